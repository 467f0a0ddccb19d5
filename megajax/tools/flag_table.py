"""Write the table of Megatron-LM's flags into docs/megatron.md: `python -m megajax.tools.flag_table`."""

from pathlib import Path

from megajax.tools.flags import Flag, Mapped, Refused
from megajax.tools.flags_of_models import ATTENTION, EXPERTS, LATENT, MEMORY, POSITIONS, SIZES, START
from megajax.tools.flags_of_operations import CHECKPOINTS, INFERENCE, LOGGING, LOOP, PROFILING
from megajax.tools.flags_of_runs import BATCH, DATA, OPTIMIZER, PARALLEL, PRECISION, SCHEDULE, SHARDING, TOKENIZER

PAGE = Path(__file__).resolve().parents[2] / "docs" / "megatron.md"
BEGIN, END = "<!-- flags: begin -->\n", "<!-- flags: end -->\n"

PARTS = {
    "Sizes of the model": SIZES,
    "Positions": POSITIONS,
    "Norms, activations, attention": ATTENTION,
    "Dropout and initial weights": START,
    "Latent attention, prediction ahead, state-space models": LATENT,
    "Mixture of experts": EXPERTS,
    "Memory": MEMORY,
    "Batch, length and evaluation": BATCH,
    "Optimizer": OPTIMIZER,
    "Learning rate and weight decay": SCHEDULE,
    "Precision": PRECISION,
    "Layout": PARALLEL,
    "Data parallelism and overlap": SHARDING,
    "Data": DATA,
    "Tokenizer": TOKENIZER,
    "Checkpoints": CHECKPOINTS,
    "Loop": LOOP,
    "Logging": LOGGING,
    "Profiling": PROFILING,
    "Inference": INFERENCE,
}


def markdown() -> str:
    """All rows, in parts: flag with its default, and setting or reason."""
    return "".join(f"\n## {title}\n\n| Flag | Here |\n|---|---|\n{_rows(rows)}" for title, rows in PARTS.items())


def _rows(rows: tuple[Flag, ...]) -> str:
    return "".join(f"| `--{row.name}`{_default(row)} | {_here(row)} |\n" for row in rows)


def _default(row: Flag) -> str:
    match row.default:
        case None | False | []:
            return ""
        case float() as number:
            return f" [{number:g}]"
        case list() as words:
            return f" [{' '.join(words)}]"
    return f" [{row.default}]"


def _here(row: Flag) -> str:
    match row.fate:
        case Mapped(settings):
            return ", ".join(f"`{setting}`" for setting in settings)
        case Refused(reason):
            return f"refused: {reason}"
    return f"unnecessary: {row.fate.reason}"


def replaced(page: str) -> str:
    """The page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + markdown() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
