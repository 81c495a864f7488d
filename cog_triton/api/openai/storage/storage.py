"""All that one application keeps."""

from dataclasses import dataclass
from pathlib import Path

from cog_triton.api.openai.storage.batches import BatchStore
from cog_triton.api.openai.storage.files import FileStore
from cog_triton.api.openai.storage.housekeeping import Housekeeping
from cog_triton.api.openai.storage.journal import Journal
from cog_triton.api.openai.storage.limits import StorageLimits
from cog_triton.api.openai.storage.responses import ResponseStore


@dataclass(frozen=True)
class Storage:
    """The stores of one application, over one journal."""

    journal: Journal
    responses: ResponseStore
    files: FileStore
    batches: BatchStore
    housekeeping: Housekeeping

    @classmethod
    def at(cls, path: Path, limits: StorageLimits) -> "Storage":
        """Return the storage in a file, which the first use opens."""
        journal = Journal(path, limits)
        responses = ResponseStore(journal)
        files = FileStore(journal)
        batches = BatchStore(journal)
        return cls(
            journal=journal,
            responses=responses,
            files=files,
            batches=batches,
            housekeeping=Housekeeping(journal, [responses, files, batches]),
        )
