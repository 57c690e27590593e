"""Lets PyPI's torchvision, which is linked to CUDA, be imported beside a torch that is built for the CPU.

Its compiled part cannot be loaded there, and without that the package fails on the names of its operators. transformers' video
processors need the package but none of those operators, so their names are enough: `watch_for_import` has them declared when
someone first imports torchvision. Where the compiled part loads, nothing is done.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

# Those that torchvision attaches shape functions to while it is imported. Nobody can call them: they have no kernels.
_BOXES = "Tensor input, Tensor rois, float scale, SymInt height, SymInt width"
_BOXES_BACKWARD = "float scale, SymInt height, SymInt width"
_SIZES = "SymInt batch, SymInt channels, SymInt rows, SymInt columns"
_CONV = "Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias"
_CONV_SIZES = ", ".join(f"SymInt {kind}_{side}" for kind in ("stride", "pad", "dilation") for side in "hw")
_CONV_OPTIONS = f"{_CONV_SIZES}, SymInt groups, SymInt offset_groups, bool use_mask"
_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_BOXES}, int sampling_ratio, bool aligned) -> Tensor",
    f"qroi_align({_BOXES}, int sampling_ratio, bool aligned) -> Tensor",
    f"_roi_align_backward(Tensor grad, Tensor rois, {_BOXES_BACKWARD}, {_SIZES}, int ratio, bool aligned) -> Tensor",
    f"roi_pool({_BOXES}) -> (Tensor, Tensor)",
    f"_roi_pool_backward(Tensor grad, Tensor rois, Tensor argmax, {_BOXES_BACKWARD}, {_SIZES}) -> Tensor",
    f"ps_roi_align({_BOXES}, int sampling_ratio) -> (Tensor, Tensor)",
    f"_ps_roi_align_backward(Tensor grad, Tensor rois, Tensor mapping, {_BOXES_BACKWARD}, int ratio, {_SIZES}) -> Tensor",
    f"ps_roi_pool({_BOXES}) -> (Tensor, Tensor)",
    f"_ps_roi_pool_backward(Tensor grad, Tensor rois, Tensor mapping, {_BOXES_BACKWARD}, {_SIZES}) -> Tensor",
    f"deform_conv2d({_CONV}, {_CONV_OPTIONS}) -> Tensor",
    f"_deform_conv2d_backward(Tensor grad, {_CONV}, {_CONV_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
_declared: list[object] = []  # torch forgets operators with the object that declared them


def watch_for_import() -> None:
    """Has `import torchvision` work in this process. Loads nothing now; a second call does nothing."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


class _Watcher:
    """Finds torchvision where it is, with a loader that first declares what it will miss."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        _declare_missing(Path(self.path).parent)
        super().exec_module(module)


def _declare_missing(package: Path) -> None:
    # here, since torch takes a second that a help page need not spend
    import torch

    load: Any = torch.ops.load_library
    declare: Any = torch.library.Library
    try:
        for file in package.glob("_C*"):
            load(str(file))
    except OSError:
        library = declare("torchvision", "DEF")
        for operator in _OPERATORS:
            library.define(operator)
        _declared.append(library)
