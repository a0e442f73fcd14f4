"""Layer types of real models, read from their Hugging Face configuration."""

from jenga.models.known import ModelFacts, find_model, known_model, known_names
from jenga.models.options import KvFormat, ReadOptions
from jenga.models.reader import MODEL_TYPES, known_type, read_model

__all__ = [
    "MODEL_TYPES",
    "KvFormat",
    "ModelFacts",
    "ReadOptions",
    "find_model",
    "known_model",
    "known_names",
    "known_type",
    "read_model",
]
