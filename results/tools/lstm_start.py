"""Give a Falcon with a linear fusion an LSTM that starts as that layer.

    python results/tools/lstm_start.py checkpoints/falcon_linear OUT

Both LSTM layers get open input and output gates (bias 2) and a forget gate of bias -2.
The cell weights of the first are the linear layer's, those of the second the identity,
divided by what the gates leave. All is scaled by .03, so that tanh is nearly linear.
Norms do not see the scale of their input, but residual connections do: the root of .03
goes into v, o, up and down of each layer and into the two input norms.
"""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402

import common  # noqa: E402
import falcon  # noqa: E402

SCALE, OPEN, FORGET, REST = 0.03, 2.0, -2.0, 0.1

linear = common.read_drafter(falcon.Drafter, sys.argv[1]).float()
torch.manual_seed(0)
config = dataclasses.replace(linear.config, fusion="lstm", csgd=True)
drafter = falcon.Drafter(config)
kept = {k: v for k, v in linear.state_dict().items() if not k.startswith("fusion")}
drafter.load_state_dict(kept, strict=False)
weight, bias = linear.fusion.weight.data, linear.fusion.bias.data
D = len(bias)
cell = slice(2 * D, 3 * D)
gain = torch.tensor(OPEN).sigmoid() ** 2  # of the input and the output gate
root = SCALE**0.5
lstm = drafter.fusion
with torch.no_grad():
    for n, start in enumerate((weight * SCALE, torch.eye(D))):
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        w_ih, w_hh, b_ih, b_hh = (getattr(lstm, f"{name}_l{n}") for name in names)
        w_ih *= REST  # what is left of the random start
        w_hh *= REST
        b_ih.zero_()
        b_hh.zero_()
        b_ih[:D], b_ih[D : 2 * D], b_ih[3 * D :] = OPEN, FORGET, OPEN
        w_ih[cell] = start / gain
    lstm.bias_ih_l0[cell] = bias * SCALE / gain
    drafter.feature_norm.weight *= root
    drafter.embed_norm.weight *= root
    lstm.weight_ih_l0[cell] /= root
    for layer in drafter.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for scaled in (attention.v_proj, attention.o_proj, mlp.up_proj, mlp.down_proj):
            scaled.weight *= root
drafter.save_pretrained(sys.argv[2])
