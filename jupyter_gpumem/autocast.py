"""What a forward pass would save for backward under ``torch.autocast``, from the graph it made without."""

import math
from collections.abc import Container, Iterator

from jupyter_gpumem.activations import Activations, Node, Saved
from jupyter_gpumem.tensors import Key

# what autocast runs in half precision, and what it keeps in float32 (torch.amp, "CUDA Ops"), by node
_IN_HALF = (
    "Addmm Mm Bmm Baddbmm Addbmm Addmv Addr Mv Dot Linear Convolution PreluKernel Matmul LinalgVecdot "
    "ThnnFusedLstmCell ThnnFusedGruCell"
)
_IN_FULL = (
    "NativeLayerNorm NativeGroupNorm FusedRmsNorm Softmax LogSoftmax Softplus Logsumexp Sum Prod Cumsum Cumprod "
    "NllLoss NllLoss2D MseLoss L1Loss SmoothL1Loss HuberLoss KlDiv SoftMarginLoss MultiMarginLoss "
    "MultilabelMarginLoss BinaryCrossEntropyWithLogits CosineSimilarity Dist Pdist Cdist Renorm Norm "
    "LinalgVectorNorm LinalgMatrixNorm Pow Exp Expm1 Log Log1P Log2 Log10 Rsqrt Reciprocal Sinh Cosh Tan Acos "
    "Asin Erfinv UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleLinear1D UpsampleBilinear2D "
    "UpsampleBicubic2D UpsampleTrilinear3D"
)
_VIEWING = "T Transpose View UnsafeView Permute Unsqueeze Squeeze Alias Expand"
_HALF, _FULL, _VIEWS = (frozenset(names.split()) for names in (_IN_HALF, _IN_FULL, _VIEWING))
_CELLS = ("ThnnFusedLstmCell", "ThnnFusedGruCell")
_LOSSES = ("NllLoss", "NllLoss2D")
_HALF_BYTES = 2


def bytes_under_autocast(graph: Activations, held: Container[Key], *, loss_in_float: bool = False) -> int | None:
    """Return what the graph would save had the forward pass run under ``torch.autocast``, in bytes.

    Parameters
    ----------
    graph
        What one forward pass saved.
    held
        Storages that stay whatever is saved: only a copy of theirs counts.
    loss_in_float
        The code of the loss casts to float32 by itself, which leaves no trace in a graph of float32. Else
        ``cross_entropy`` saves its result twice, in both precisions.

    Notes
    -----
    None for recurrent layers of cuDNN, whose copies the library decides.
    """
    if any(node.operation == "CudnnRnn" for node in graph.nodes):
        return None
    return sum(_Forward(graph, loss_in_float=loss_in_float).kept(held).values())


class _Forward:
    """The forward pass once more, step by step: the precision of each result, and what each step saves."""

    def __init__(self, graph: Activations, *, loss_in_float: bool) -> None:
        self._nodes = graph.nodes
        self._is_half: list[bool] = []
        self._weights: set[int] = set()
        self._in_cells = set(self._taken_by(_CELLS))
        self._follow_input = set() if loss_in_float else set(self._taken_by(_LOSSES))

    def _taken_by(self, operations: tuple[str, ...]) -> Iterator[int]:
        for node in self._nodes:
            if node.operation in operations:
                yield from (other for other, _result in node.after)

    def kept(self, held: Container[Key]) -> dict[tuple[Key, int | None], int]:
        """Return the bytes that stay, by storage and copy: None as it is, -1 in half, else a step's own copy."""
        kept: dict[tuple[Key, int | None], int] = {}
        for index, node in enumerate(self._nodes):
            inputs = {other for other, _result in node.after}
            if node.parameter is not None or (inputs and inputs <= self._weights and node.operation in _VIEWS):
                self._weights.add(index)
            self._is_half.append(self._runs_in_half(index, node, inputs))
            # autocast keeps its copies of weights for the next use, of nothing else
            shares = all(self._is_half[other] for other in inputs - self._weights)
            for one in node.saved:
                if one.dtype == "torch.float32" and self._is_saved_in_half(index, node, one):
                    if one.is_weight and _is_cast(node):
                        kept[one.key, index if index in self._in_cells else -1] = one.nbytes // 2
                    elif not one.is_weight and (shares or not _is_cast(node)):
                        kept[one.key, -1] = one.nbytes // 2
                    elif not one.is_weight:
                        kept[one.key, index] = math.prod(one.shape) * _HALF_BYTES
                elif not one.is_weight and one.key not in held:
                    kept[one.key, None] = one.nbytes
        return kept

    def _runs_in_half(self, index: int, node: Node, inputs: set[int]) -> bool:
        """Tell whether a step's result has half precision: as what it takes has."""
        if _is_cast(node):
            return True
        # neither the weights of a batch norm nor the bias of a linear layer widen the result
        if "BatchNorm" in node.kind or self._adds_bias(node, inputs):
            inputs = inputs - self._weights
        return not self._is_full(index, node) and bool(inputs) and all(self._is_half[other] for other in inputs)

    def _adds_bias(self, node: Node, inputs: set[int]) -> bool:
        """Tell whether a step is the end of a linear layer: a product with a weight, and its bias added."""
        if node.operation != "Add" or len(inputs - self._weights) != 1:
            return False
        (before,) = inputs - self._weights
        while self._nodes[before].operation in _VIEWS and self._nodes[before].after:
            before = self._nodes[before].after[0][0]
        return self._nodes[before].operation == "Mm" and bool(inputs & self._weights)

    def _is_saved_in_half(self, index: int, node: Node, one: Saved) -> bool:
        if self._is_full(index, node) or _is_statistic(node, one):
            return False
        if _is_cast(node) or one.operand is None:
            return self._is_half[index]
        made_by = node.operands[one.operand] if one.operand < len(node.operands) else None
        return made_by is not None and self._is_half[made_by]

    def _is_full(self, index: int, node: Node) -> bool:
        # cross_entropy calls log_softmax with its input's own type
        return node.operation in _FULL and not (node.operation == "LogSoftmax" and index in self._follow_input)


def _is_cast(node: Node) -> bool:
    """Tell whether autocast casts what a step takes, weights included, to half precision."""
    return node.operation in _HALF or node.kind.startswith("ScaledDotProduct")


def _is_statistic(node: Node, one: Saved) -> bool:
    # the log-sum-exp of attention stays in float32
    return node.kind.startswith("ScaledDotProduct") and len(one.shape) == 3
