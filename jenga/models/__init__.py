"""Layer types of real models, read from their Hugging Face configuration."""

from jenga.models.options import KvFormat, ReadOptions
from jenga.models.reader import MODEL_TYPES, read_model

__all__ = ["MODEL_TYPES", "KvFormat", "ReadOptions", "read_model"]
