"""README.md of a converted folder: where it comes from, how it was made, and what was measured.

The front matter is the YAML that the hub reads (its documentation, "Model cards"). What the source's own card
says of licence, language and base model is taken over; its text is not, since it describes another model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxserve import __version__
from mlxserve_convert.check import Proof
from mlxserve_convert.options import ConvertOptions, ConvertReport

if TYPE_CHECKING:
    from mlxserve_convert.checkpoint import Checkpoint

_KEPT = ("license", "license_name", "license_link", "language", "datasets")
_SHOWN_NAMES = 8
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_SNAPSHOT = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")


def write_card(folder: Path, report: ConvertReport, options: ConvertOptions, checkpoint: Checkpoint) -> None:
    """Writes README.md into ``folder``."""
    text = _front_matter(checkpoint) + _body(report, options, base_model(checkpoint))
    (folder / "README.md").write_text(text, encoding="utf-8")


def base_model(checkpoint: Checkpoint) -> str | None:
    """The hub's name of the source, where its place, card or config tells it."""
    match = _SNAPSHOT.search(f"{checkpoint.path.absolute().as_posix()}/")
    if match is not None:
        return f"{match[1]}/{match[2]}"
    for name in (checkpoint.card.get("base_model"), checkpoint.config.get("_name_or_path")):
        value = name[0] if isinstance(name, list) and len(name) == 1 else name
        if isinstance(value, str) and _REPO_ID.fullmatch(value):
            return value
    return None


def _front_matter(checkpoint: Checkpoint) -> str:
    import yaml

    card = checkpoint.card
    fields: dict[str, Any] = {key: card[key] for key in _KEPT if card.get(key)}
    name = base_model(checkpoint)
    if name is not None:
        fields |= {"base_model": name, "base_model_relation": "quantized"}
    tags = card.get("tags")
    kept = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    fields |= {
        "library_name": "mlx",
        "pipeline_tag": card.get("pipeline_tag", "text-generation"),
        "tags": list(dict.fromkeys(["mlx", "mlxserve", *kept])),
    }
    return f"---\n{yaml.safe_dump(fields, allow_unicode=True, sort_keys=False)}---\n"


def _body(report: ConvertReport, options: ConvertOptions, base: str | None) -> str:
    source = report.source.stem if report.source.suffix == ".gguf" else report.source.name
    name = base.rpartition("/")[2] if base else source
    parts = [
        f"# {name} for MLX",
        f"An MLX model ({report.model_type}), converted from {f'`{base}`' if base else name} "
        f"({report.source_format}) by mlxserve {__version__}.",
        "## Conversion",
        _table(
            [
                ("options", _options(options)),
                ("weights", f"{report.num_parameters:,}"),
                ("size", f"{report.num_bytes / 1e6:,.1f} MB"),
                ("bits per weight", f"{report.bits_per_weight:.3f}"),
                ("matrices quantized", str(report.num_quantized)),
                ("matrices left as floats", _some(report.unquantized_matrices)),
                ("formats", _formats(report)),
                ("exact tensors", f"{len(report.tensors) - len(report.inexact_tensors)}"),
                ("inexact tensors", _some([tensor.name for tensor in report.inexact_tensors])),
            ]
        ),
        *(f"- {warning}" for warning in report.warnings),
        "## Check",
        _proof(report.proof) if report.proof is not None else f"{report.verified}.",
        "## Use",
        "```sh\nmlxserve serve path/to/this/folder\n```",
        "```sh\npip install mlx-lm\nmlx_lm.generate --model path/to/this/folder --prompt 'Hello'\n```",
    ]
    return "\n" + "\n\n".join(parts) + "\n"


def _options(options: ConvertOptions) -> str:
    wishes = {
        "bits": options.bits,
        "group size": options.group_size,
        "mode": options.mode,
        "recipe": options.recipe,
        "target bits per weight": options.target_bpw,
        "dtype": options.dtype,
        "dequantize": options.dequantize or None,
    }
    given = [f"{key} {value}" for key, value in wishes.items() if value is not None]
    return ", ".join(given) or "defaults"


def _formats(report: ConvertReport) -> str:
    counts: dict[str, int] = {}
    for tensor in report.tensors:
        kind = tensor.dtype if tensor.bits is None else f"{tensor.mode} {tensor.bits}-bit"
        if tensor.group_size is not None:
            kind += f" group {tensor.group_size}"
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items()))


def _proof(proof: Proof) -> str:
    found = proof.divergence
    table = _table(
        [
            ("perplexity of the source", f"{found.perplexity_a:.3f}"),
            ("perplexity of this model", f"{found.perplexity_b:.3f}"),
            ("mean KL, nats a token", f"{found.mean_kl:.5f} ({proof.bound_text})"),
            ("99 % of positions under", f"{found.p99_kl:.4f}"),
            ("largest", f"{found.max_kl:.4f}"),
            ("same likeliest token", f"{found.same_top:.2%}"),
        ]
    )
    return (
        f"On {found.num_tokens} tokens of Michael Faraday's *The Chemical History of a Candle* (1861), in "
        f"windows of {proof.context} tokens{'' if proof.is_good else ', beyond the bound'}:\n\n{table}"
    )


def _table(rows: list[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _some(names: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN_NAMES])
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"{len(names)}{f' ({shown}{more})' if names else ''}"
