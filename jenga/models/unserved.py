"""Models that are planned and that no engine serves, each with the pieces that are missing."""

from jenga.models.config import Config
from jenga.models.reader import known_type

MISSING_PIECES = {
    "hymba": (
        "two pieces are missing: layers in which one projection feeds attention and a Mamba-1 "
        "scan, and a window beside which every token also reads the memory tokens at the start"
    ),
}
"""`model_type` of the reader -> what an engine lacks, as a clause."""


def missing_pieces(config: Config) -> str:
    """Get what an engine lacks for a model, as a clause; empty if nothing is known to be missing.

    Args:
        config: Fields of the model.
    """
    return MISSING_PIECES.get(known_type(config) or "", "")
