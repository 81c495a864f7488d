"""Imports transformers in less time."""

from pathlib import Path
from typing import Any


def list_models_once() -> None:
    """Import transformers, and let it search its 1,600 files for the names of models once, not twice.

    It does so for itself and again for ``transformers.models``: each time takes half a second.
    """
    import transformers
    from transformers.utils import import_utils

    original: Any = import_utils.define_import_structure
    directory = Path(transformers.__file__).parent / "models"

    def define_import_structure(module_path: Any, prefix: str | None = None) -> Any:
        if prefix is not None or Path(module_path).parent != directory:
            return original(module_path, prefix)
        # The arguments are those of transformers' own call, whose result it keeps, and adds to.
        whole = original(directory, prefix="models")
        found: dict[Any, dict[str, Any]] = {}
        for backends, modules in whole.items():
            found[backends] = {
                name.removeprefix("models."): names
                for name, names in modules.items()
                if name.startswith("models.")
            }
        return found

    if not hasattr(original, "lists_once"):
        define_import_structure.lists_once = True  # type: ignore[attr-defined]
        import_utils.define_import_structure = define_import_structure
