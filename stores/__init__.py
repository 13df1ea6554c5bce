"""Where results are kept: named bytes over any fsspec file system, results of sessions, and what replaces them."""

from stores.backend import StoredKey, StoredObject
from stores.errors import (
    AlreadyExists,
    Damaged,
    KeyRefused,
    NotFound,
    PatternRefused,
    QuotaExceeded,
    StoreError,
    StoreUnavailable,
)
from stores.grep import GrepLine, GrepPage
from stores.keys import check_key, file_key, result_key
from stores.lines import LineIndex, LinesPage
from stores.pointer import escape, is_pointer, pointer, preview
from stores.policies import (
    AlwaysOffload,
    Measured,
    NeverOffload,
    OffloadOverBytes,
    OffloadOverChars,
    OffloadOverLines,
    OffloadPolicy,
    ResultSize,
)
from stores.results import ResultStore, StoredResult
from stores.sources import Source, SourceFile
from stores.store import Probe, Store

__all__ = [
    "AlreadyExists",
    "AlwaysOffload",
    "Damaged",
    "GrepLine",
    "GrepPage",
    "KeyRefused",
    "LineIndex",
    "LinesPage",
    "Measured",
    "NeverOffload",
    "NotFound",
    "OffloadOverBytes",
    "OffloadOverChars",
    "OffloadOverLines",
    "OffloadPolicy",
    "PatternRefused",
    "Probe",
    "QuotaExceeded",
    "ResultSize",
    "ResultStore",
    "Source",
    "SourceFile",
    "Store",
    "StoreError",
    "StoreUnavailable",
    "StoredKey",
    "StoredObject",
    "StoredResult",
    "check_key",
    "escape",
    "file_key",
    "is_pointer",
    "pointer",
    "preview",
    "result_key",
]
