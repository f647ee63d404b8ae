"""Recipes: the numerics of one linear as a policy file writes them, their meaning, their faults, and back to a file.

Lines and files are :mod:`.policy_file`'s: whoever reads a file passes ``error``, which makes an error of a place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field

from .errors import PolicyError, nearest
from .formats import ELEMENT_FORMATS
from .schedule import FileModel
from .spec import GEMMS, GemmSpec, LinearSpec, OperandSpec, Outliers

Place = tuple[str | int, ...]
MakeError = Callable[[Place, str], PolicyError]

CHOICES: dict[str, tuple[object, ...]] = {
    "scale": ("float32", "e8m0", "e4m3fn"),
    "rule": ("nearest", "ceil", "floor", "rceil", "rceil_satfinite", "even"),
    "scaling": ("current", "delayed"),
    "rounding": ("rne", "rna", "stochastic"),
    "hadamard": (0, 16, 32, 64, 128),
    "source": ("original", "dequantized"),
}
FILE_KEYS = {"rule": "scale_rule"}  # an OperandSpec field whose policy-file key differs

_TENSOR, _ROW = (-1, -1), (1, -1)
_MX = OperandSpec("e4m3fn", block=(1, 32), scale="e8m0", rule="rceil")
_NVFP4 = OperandSpec("e2m1", block=(1, 16), scale="e4m3fn", outer=_TENSOR)
_HIF8 = OperandSpec("hif8", target=15.0, rounding="rna")
# What an operand may be called in a file. A bare element format means one float32 scale for the whole tensor.
OPERANDS: dict[str, OperandSpec] = {
    **{name: OperandSpec(name, rounding=f.ties) for name, f in ELEMENT_FORMATS.items()},
    "bf16": OperandSpec(),
    "fp8_tensor": OperandSpec("e4m3fn"),
    "fp8_row": OperandSpec("e4m3fn", block=_ROW),
    "e5m2_tensor": OperandSpec("e5m2"),
    "mxfp8": _MX,
    "mxfp4": replace(_MX, format="e2m1"),
    "nvfp4": _NVFP4,
    "nvfp4_2d": replace(_NVFP4, block=(16, 16)),
    "nvfp4_double": replace(_NVFP4, outer=(1, 128)),
    "hif8": _HIF8,
    "hif8_grad": replace(_HIF8, target=224.0),
    "int8_row": OperandSpec("int8", block=_ROW),
    "int4_row": OperandSpec("int4", block=_ROW),
}


_Pair = Annotated[list[int], Field(min_length=2, max_length=2)]


class OperandModel(FileModel):
    """An operand as a policy file writes it: a name of ``OPERANDS`` or an element format, and what differs from it."""

    format: str
    block: _Pair | None = None
    scale: Literal["float32", "e8m0", "e4m3fn"] | None = None
    outer: _Pair | None = None
    scale_rule: Literal["nearest", "ceil", "floor", "rceil", "rceil_satfinite", "even"] | None = None
    scaling: Literal["current", "delayed"] | None = None
    target: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    rounding: Literal["rne", "rna", "stochastic"] | None = None
    hadamard: Literal[0, 16, 32, 64, 128] | None = None
    source: Literal["original", "dequantized"] | None = None
    four_over_six: bool | None = None


class _Fprop(FileModel):
    x: OperandModel
    w: OperandModel


class _Dgrad(FileModel):
    g: OperandModel
    w: OperandModel


class _Wgrad(FileModel):
    g: OperandModel
    x: OperandModel


class OutliersModel(FileModel):
    """OutControl: which input channels leave the recipe's format, for which one, and when they are chosen."""

    fraction: Annotated[float, Field(gt=0, le=0.5)] | None = None
    count: Annotated[int, Field(gt=0)] | None = None
    format: OperandModel = OperandModel(format="mxfp8")
    observe: _Pair


class RecipeModel(FileModel):
    """A recipe as a policy file writes it, after :func:`expand_recipe`."""

    fprop: _Fprop
    dgrad: _Dgrad
    wgrad: _Wgrad
    outliers: OutliersModel | None = None


def expand_recipe(recipe: Any) -> Any:  # noqa: C901  (one branch a shorthand)
    """A raw recipe with its shorthands written out: a name for all operands, ``bwd``, ``same``, a name for an operand.

    Anything else is left as it is, for the checks that follow. Raises :class:`PolicyError` where ``bwd`` competes.
    """
    if isinstance(recipe, str):
        recipe = {"fprop": recipe, "bwd": recipe}
    if not isinstance(recipe, dict):
        return recipe
    gemms = dict(recipe)
    if "bwd" in gemms:
        if both := [g for g in ("dgrad", "wgrad") if g in gemms]:
            raise PolicyError(f"bwd stands for dgrad and wgrad; drop it or {both[0]}")
        bwd = gemms.pop("bwd")
        for gemm, other in (("dgrad", "x"), ("wgrad", "w")):
            gemms[gemm] = {k: v for k, v in bwd.items() if k != other} if isinstance(bwd, dict) else bwd
    if isinstance(gemms.get("fprop"), str):
        gemms["fprop"] = dict.fromkeys(GEMMS["fprop"], gemms["fprop"])
    fprop = gemms.get("fprop")
    for gemm, operands in gemms.items():
        if operands == "same" and gemm in GEMMS and isinstance(fprop, dict):
            sources = {k: "x" if k == "g" else k for k in GEMMS[gemm]}
            operands = {k: fprop[source] for k, source in sources.items() if source in fprop}
        elif isinstance(operands, str) and gemm in GEMMS:
            operands = dict.fromkeys(GEMMS[gemm], operands)
        if isinstance(operands, dict):
            names = ("format",) if gemm == "outliers" else tuple(operands)
            operands = {k: {"format": v} if k in names and isinstance(v, str) else v for k, v in operands.items()}
        gemms[gemm] = operands
    return gemms


def spec_faults(spec: LinearSpec) -> Iterator[tuple[str, str]]:
    """Every reason why ``spec`` has no meaning, as (place such as ``wgrad.g.rounding``, message)."""
    for gemm, names in GEMMS.items():
        pair: GemmSpec = getattr(spec, gemm)
        for name, operand in zip(names, (pair.a, pair.b), strict=True):
            for key, message in (*_operand_faults(operand), *_place_faults(spec, gemm, name, operand)):
                yield f"{gemm}.{name}.{key}", message
        if pair.a.hadamard != pair.b.hadamard:
            a, b = (f"{n} has {o.hadamard}" for n, o in zip(names, (pair.a, pair.b), strict=True))
            yield gemm, f"hadamard must be equal on both operands, or it doesn't cancel: {a}, {b}"
    if spec.outliers is not None:
        yield from _outlier_faults(spec, spec.outliers)
    if spec.delayed and not spec.observe:
        yield "observe", "must be True where an operand has delayed scaling"


def _place_faults(spec: LinearSpec, gemm: str, name: str, operand: OperandSpec) -> Iterator[tuple[str, str]]:
    """Faults of an operand that come from where it stands."""
    if gemm == "fprop" and operand.rounding == "stochastic":
        yield "rounding", "stochastic rounding in fprop diverges; allowed in fprop: rne, rna"
    if operand.source == "dequantized":
        used = {("dgrad", "w"): spec.fprop.b, ("wgrad", "x"): spec.fprop.a}.get((gemm, name))
        if used is None:
            yield "source", "dequantized is for dgrad's w and wgrad's x only"
        elif not used.quantized:
            yield "source", f"dequantized has no effect: fprop's {name} is not quantized"


def _outlier_faults(spec: LinearSpec, outliers: Outliers) -> Iterator[tuple[str, str]]:
    operand = outliers.operand
    for key, message in _operand_faults(operand):
        yield f"outliers.format.{key}", message
    if not (spec.fprop.a.quantized and spec.fprop.b.quantized):
        yield "outliers", "needs both operands of fprop quantized"
    if not operand.quantized or operand.rounding == "stochastic" or operand.hadamard or operand.scaling == "delayed":
        yield (
            "outliers.format",
            "outlier channels need a quantized format, rounding rne or rna, hadamard 0, scaling current",
        )
    if operand.source != "original":
        yield "outliers.format.source", "has no effect here: backward takes the source from wgrad's x and dgrad's w"
    if not 0 <= outliers.start < outliers.stop:
        yield "outliers.observe", f"found {[outliers.start, outliers.stop]}; allowed: [first step, first step after it]"


def _operand_faults(operand: OperandSpec) -> Iterator[tuple[str, str]]:  # noqa: C901  (a list of checks)
    if not operand.quantized:
        if replace(operand, source="original") != OperandSpec():
            yield "format", "bf16 is not quantized: of the other keys only source has an effect"
        return
    if operand.format not in ELEMENT_FORMATS:
        yield "format", f"{operand.format!r} can't hold elements; allowed: {', '.join(ELEMENT_FORMATS)}"
        return
    for field, allowed in CHOICES.items():
        if getattr(operand, field) not in allowed:
            shown = ", ".join(map(str, allowed))
            yield FILE_KEYS.get(field, field), f"found {getattr(operand, field)!r}; allowed: {shown}"
    if any(n != -1 and n < 1 for n in operand.block):
        yield "block", f"found {list(operand.block)}; allowed: two numbers, each >= 1 or -1 for the whole axis"
    if not 0 <= operand.target <= ELEMENT_FORMATS[operand.format].max:
        yield "target", f"{operand.target} is not within 0 and {operand.format}'s maximum"
    if operand.scale == "float32" and operand.rule != "nearest":
        yield "scale_rule", f"{operand.rule} has no effect: a float32 scale is not rounded"
    if operand.scaling == "delayed" and (operand.block != _TENSOR or operand.outer != (0, 0)):
        yield "scaling", "delayed needs one scale for the whole tensor: block [-1, -1], no outer"
    if operand.four_over_six and (operand.format, operand.scale) != ("e2m1", "e4m3fn"):
        yield "four_over_six", "is defined for e2m1 elements with e4m3fn scales only"
    if operand.outer != (0, 0):
        if operand.scale != "e4m3fn":
            yield "outer", "a second-level scale needs scale: e4m3fn"
        axes = zip(operand.outer, operand.block, strict=True)
        if not all(o == -1 or (o > 0 and b > 0 and o % b == 0) for o, b in axes):
            yield "outer", f"{list(operand.outer)} is not a whole number of blocks {list(operand.block)} on each axis"


def freeze_recipe(name: str, model: RecipeModel, error: MakeError) -> LinearSpec:
    """The numerics that the recipe ``name`` means. Raises what ``error`` makes where it has no meaning."""
    place: Place = ("recipes", name)
    gemms: dict[str, Any] = {}
    for gemm, names in GEMMS.items():
        pair = getattr(model, gemm)
        gemms[gemm] = GemmSpec(*(_freeze_operand((*place, gemm, n), getattr(pair, n), error) for n in names))
    spec = LinearSpec(**gemms, outliers=_freeze_outliers((*place, "outliers"), model.outliers, error))
    spec = replace(spec, observe=spec.delayed)
    for where, problem in spec_faults(spec):
        raise error((*place, *where.split(".")), problem)
    return spec


def _freeze_operand(place: Place, model: OperandModel, error: MakeError) -> OperandSpec:
    """Named operand first, then the keys beside it; a new scale format brings its own rule unless one is given."""
    base = OPERANDS.get(model.format)
    if base is None:
        hint = "; e8m0 is for scales" if model.format == "e8m0" else nearest(model.format, OPERANDS)
        known = ", ".join(OPERANDS)
        raise error((*place, "format"), f"found {model.format!r}; allowed: {known}{hint}")
    given: dict[str, Any] = model.model_dump(exclude_none=True, exclude={"format"})
    if "scale" in given and given["scale"] != base.scale:
        base = replace(base, rule="rceil" if given["scale"] == "e8m0" else "nearest")
    for pair in ("block", "outer"):
        if pair in given:
            given[pair] = tuple(given[pair])
    if "scale_rule" in given:
        given["rule"] = given.pop("scale_rule")
    if "target" in given:
        given["target"] = float(given["target"])
    return replace(base, **given)


def _freeze_outliers(place: Place, model: OutliersModel | None, error: MakeError) -> Outliers | None:
    if model is None:
        return None
    if (model.fraction is None) == (model.count is None):
        raise error(place, "needs exactly one of fraction and count")
    operand = _freeze_operand((*place, "format"), model.format, error)
    start, stop = model.observe
    return Outliers(operand, model.fraction or 0.0, model.count or 0, start, stop)


def recipe_document(spec: LinearSpec) -> dict[str, object]:
    """``spec`` as a file would write it, nothing left out: what :func:`freeze_recipe` reads back to an equal one."""
    gemms = {gemm: getattr(spec, gemm) for gemm in GEMMS}
    found: dict[str, object] = {
        g: {GEMMS[g][0]: _operand_document(s.a), GEMMS[g][1]: _operand_document(s.b)} for g, s in gemms.items()
    }
    if (outliers := spec.outliers) is not None:
        size = {"count": outliers.count} if outliers.count else {"fraction": outliers.fraction}
        observe = [outliers.start, outliers.stop]
        found["outliers"] = {**size, "format": _operand_document(outliers.operand), "observe": observe}
    return found


def _operand_document(operand: OperandSpec) -> dict[str, object]:
    if not operand.quantized:
        return {"format": operand.format, "source": operand.source}
    return {
        "format": operand.format,
        "block": list(operand.block),
        "scale": operand.scale,
        "outer": list(operand.outer),
        "scale_rule": operand.rule,
        "target": operand.target,
        "scaling": operand.scaling,
        "rounding": operand.rounding,
        "hadamard": operand.hadamard,
        "source": operand.source,
        "four_over_six": operand.four_over_six,
    }
