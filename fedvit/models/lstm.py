"""A recurrent network that predicts every next character of a text: the usual baseline of federated language tasks.

In a graph its loop over time is written out, step by step, with operators that every other model has. Letters in
names: B batch, T characters of context, D width of what enters a layer, H units, G 4 x H, the gates of all units.
"""

import torch
from torch import Tensor, nn

from fedvit.model_options import TextLstmOptions
from fedvit.models.text import TextModel


class LstmLayer(nn.Module):
    """One layer, from a state of zeros.

    Source: Hochreiter and Schmidhuber, Neural Computation 9 (1997), with forget gates and without peepholes, as in
    torch. Differs from torch: one bias in the place of two that are added, and the gates in the order input, forget,
    output, candidate, so that one sigmoid computes three of them.
    """

    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        self.units = units
        bound = units**-0.5
        self.input_weight = nn.Parameter(torch.empty(4 * units, width).uniform_(-bound, bound))
        self.state_weight = nn.Parameter(torch.empty(4 * units, units).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(4 * units).uniform_(-bound, bound))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """(B, T, H) the state after each character."""
        # of all characters at once: only the product with the state has to wait for the step before
        given = nn.functional.linear(x_BTD, self.input_weight, self.bias).unbind(dim=1)
        states: list[Tensor] = []
        cell_BH: Tensor | None = None
        for given_BG in given:
            if states:
                given_BG = given_BG + nn.functional.linear(states[-1], self.state_weight)
            gates, candidate = given_BG.split([3 * self.units, self.units], dim=1)
            enters, keeps, leaves = gates.sigmoid().chunk(3, dim=1)
            added_BH = enters * candidate.tanh()
            cell_BH = added_BH if cell_BH is None else keeps * cell_BH + added_BH
            states.append(leaves * cell_BH.tanh())
        return torch.stack(states, dim=1)


class _Layers(nn.Module):
    """The tensors, named as a Transformer's where they do the same."""

    def __init__(self, classes: int, width: int, units: int, depth: int) -> None:
        super().__init__()
        self.embed_dim = units
        self.num_classes = classes
        self.num_prefix_tokens = 0
        self.token_embed = nn.Embedding(classes, width)
        self.blocks = nn.Sequential(*(LstmLayer(units if layer else width, units) for layer in range(depth)))
        self.head = nn.Linear(units, classes)


class TextLstm(TextModel):
    kind = "an LSTM"

    def activation_bytes(self, tokens: int) -> int:
        """Memory for the backward pass: for each step of a layer 4 gates, 2 hyperbolic tangents, cell and state, and as
        many again while they are differentiated."""
        return 4 * self.depth * tokens * 16 * self.width

    def product_rows(self, tokens: int) -> int:
        """Steps follow each other, each with a product of its own."""
        return 1


def make_text_lstm(name: str, classes: int, options: TextLstmOptions) -> TextLstm:
    """Make the model that is, by default, that of LEAF and of federated averaging's paper.

    Source: McMahan et al., arXiv:1602.05629, section 3; Caldas et al., "LEAF", arXiv:1812.01097: an embedding of 8 and
    two layers of 256 units.
    """
    layers = _Layers(classes, options.embedding, options.width, options.depth)
    return TextLstm(name, options.context, layers)
