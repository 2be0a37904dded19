"""Wan's names and shapes: the key schemes of its files, and students, distilled weights in any of them."""

from .convert import check_base, convert, convert_metadata, load_student
from .header import StudentError
from .students import DIFF, FULL, LOW_RANK, Student, read_student

__all__ = [
    "DIFF",
    "FULL",
    "LOW_RANK",
    "Student",
    "StudentError",
    "check_base",
    "convert",
    "convert_metadata",
    "load_student",
    "read_student",
]
