"""Checkpoints that don't know the layout: written as pieces by any number of ranks, read as regions by any other."""

from paceline.runtime.checkpoint.dtypes import load_tensors
from paceline.runtime.checkpoint.pieces import Region, TensorPiece, pieces_of
from paceline.runtime.checkpoint.read import Checkpoint, TensorEntry, newest_checkpoint, open_checkpoint
from paceline.runtime.checkpoint.write import Writer, write_json, write_model

__all__ = [
    "Checkpoint",
    "Region",
    "TensorEntry",
    "TensorPiece",
    "Writer",
    "load_tensors",
    "newest_checkpoint",
    "open_checkpoint",
    "pieces_of",
    "write_json",
    "write_model",
]
