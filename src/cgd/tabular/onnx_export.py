"""`cgd export --onnx`: write a trained model as an ONNX file, for tools that have neither `cgd` nor torch.

See `cgd.tabular.onnx_graph` for what the graph does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cgd.errors import InputError
from cgd.extras import require
from cgd.files import PRIVATE, write_file

if TYPE_CHECKING:
    from cgd.tabular.model import ConfinedModel


def export_onnx(model: ConfinedModel, path: str | Path) -> list[str]:
    """Write a model as an ONNX file that its owner alone can read: it has the model, which is as secret as the folder.

    Args:
        model: the model.
        path: the file, which is never replaced.

    Returns:
        A line for each input and output of the graph.

    Raises:
        InputError: the model cannot be exported, or the file exists or cannot be written.
        MissingExtraError: the library onnx is not installed.

    Examples:
        ```python
        cgd.export_onnx(cgd.load_model("runs/hospital-a"), "diagnosis.onnx")
        ```
    """
    require("onnx", "exporting a model")
    from cgd.tabular.onnx_graph import describe, to_onnx

    made, file = to_onnx(model), Path(path)
    try:
        write_file(file, made.SerializeToString(deterministic=True), mode=PRIVATE, new=True)
    except FileExistsError:
        raise InputError(f"{file} exists and is never overwritten; name another file, or move it away") from None
    except OSError as error:
        raise InputError(f"{file} cannot be written ({error.strerror}); name another file") from None
    return describe(made)
