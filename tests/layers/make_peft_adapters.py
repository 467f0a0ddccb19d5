"""Write peft_adapters.json: outputs and gradients of adapted linear layers of the PEFT library.

Run in an environment with peft and torch: python tests/layers/make_peft_adapters.py
"""

import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

INPUTS, OUTPUTS, RANK, ROWS = 4, 6, 2, 3


class Linear(torch.nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def case(*, dora: bool, rslora: bool) -> dict[str, object]:
    """The arrays of one layer, and the gradients of sum(y * dy)."""
    torch.manual_seed(0)
    settings = LoraConfig(
        r=RANK, lora_alpha=3, target_modules=["layer"], use_dora=dora, use_rslora=rslora, init_lora_weights=False
    )
    layer = get_peft_model(Linear(), settings).base_model.model.layer
    a, b = (part["default"].weight for part in (layer.lora_A, layer.lora_B))
    leaves = {"a": a, "b": b}
    if dora:
        magnitude = layer.lora_magnitude_vector["default"].weight
        with torch.no_grad():
            magnitude += 0.3 * torch.randn(OUTPUTS)
        leaves["magnitude"] = magnitude
    x, dy = torch.randn(ROWS, INPUTS, requires_grad=True), torch.randn(ROWS, OUTPUTS)
    y = layer(x)
    (y * dy).sum().backward()
    arrays = {"w": layer.base_layer.weight, "x": x, "dy": dy, "y": y, "dx": x.grad, **leaves}
    arrays |= {f"d{name}": leaf.grad for name, leaf in leaves.items()}
    return {
        "dora": dora,
        "rslora": rslora,
        "alpha": 3,
        **{name: array.detach().tolist() for name, array in arrays.items()},
    }


if __name__ == "__main__":
    cases = [case(dora=dora, rslora=rslora) for dora in (False, True) for rslora in (False, True)]
    Path(__file__).with_name("peft_adapters.json").write_text(json.dumps(cases, indent=None) + "\n")
