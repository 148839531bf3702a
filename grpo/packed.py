"""The loss's pass over a micro-batch as one row without padding, for GPUs.

Each group's prompt comes once, and then its completions. A completion's queries see the keys of its
prompt and its own, which are gathered for it, so that nothing is masked or padded and the whole
micro-batch is one pass. utils._completion_hidden_states takes one pass for the prompts and several
for the completions instead, and a GPU waits for Python to launch the kernels of each.

Shapes: B sequences, P prompt tokens, C completion tokens, T = P + C, N completion tokens of all
sequences, M packed tokens, S segments (a prompt or a completion each), K keys of all segments.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "packed_or_sdpa"  # the name under which transformers finds the two functions below


@dataclass
class Packing:
    """Where the tokens of a micro-batch lie in the packed row, and which keys they see."""

    rows: list[Tensor] = field(default_factory=list)  # (M,): a packed token stands in this row
    columns: list[Tensor] = field(default_factory=list)  # (M,): and column of (B, T)
    positions: list[Tensor] = field(default_factory=list)  # (M,): its position in its sequence
    keys: list[Tensor] = field(default_factory=list)  # (K,): packed indices, segment by segment
    predicting: list[Tensor] = field(default_factory=list)  # (N,): of what predicts each token
    query_lengths: list[int] = field(default_factory=list)  # (S,)
    key_lengths: list[int] = field(default_factory=list)  # (S,)

    def add(self, row: int, columns: Tensor, first_position: int, context: Tensor) -> Tensor:
        """Add a segment, whose queries see a context before it. Returns its packed indices."""
        length = len(columns)
        indices = torch.arange(length) + sum(self.query_lengths)
        self.rows.append(torch.full((length,), row))
        self.columns.append(columns)
        self.positions.append(torch.arange(length) + first_position)
        self.keys.append(torch.cat([context, indices]))
        self.query_lengths.append(length)
        self.key_lengths.append(len(context) + length)
        return indices


def pack(attention_mask: Tensor, C: int, group_size: int) -> Packing:
    """The packing of a micro-batch with the mask (B, T); group_size rows share their prompt."""
    B, T = attention_mask.shape
    P = T - C
    prompt_lengths = attention_mask[:, :P].sum(1).tolist()
    completion_lengths = attention_mask[:, P:].sum(1).tolist()
    packing = Packing()
    for row in range(B):
        prompt_length = prompt_lengths[row]
        length = completion_lengths[row]
        if row % group_size == 0:
            columns = torch.arange(P - prompt_length, P)
            prompt = packing.add(row, columns, 0, context=torch.arange(0))
        if length > 0:
            packing.predicting.append(prompt[-1:])
        if length > 1:
            columns = torch.arange(P, P + length - 1)  # nothing follows the last token
            indices = packing.add(row, columns, prompt_length, context=prompt)
            packing.predicting.append(indices)
    return packing


def token_states(
    model: PreTrainedModel, ids: Tensor, attention_mask: Tensor, C: int, group_size: int
) -> Tensor:
    """(N, H): the last hidden state before each completion token, row by row.

    Args:
        ids, attention_mask: (B, T), prompts padded on the left and completions on the right.
    """
    packing = pack(attention_mask.cpu(), C, group_size)
    rows = torch.cat(packing.rows).to(ids.device)
    columns = torch.cat(packing.columns).to(ids.device)
    positions = torch.cat(packing.positions).to(ids.device)
    keys = torch.cat(packing.keys).to(ids.device)
    predicting = torch.cat(packing.predicting).to(ids.device)
    outputs = model.get_decoder()(
        ids[rows, columns].unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        # transformers hands these on to the attention.
        packed_keys=keys,
        query_lengths=packing.query_lengths,
        key_lengths=packing.key_lengths,
    )
    return outputs.last_hidden_state[0].index_select(0, predicting)


def packed_or_sdpa(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    packed_keys=None,
    query_lengths=None,
    key_lengths=None,
    **options,
):
    """Attention of a packed row (1, heads, M, D), or SDPA of anything else."""
    if packed_keys is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    dtype = value.dtype  # under autocast queries and keys are float32, because of rotary factors
    queries = query[0].transpose(0, 1).to(dtype)  # (M, heads, D)
    keys = key[0].transpose(0, 1).index_select(0, packed_keys).to(dtype)  # (K, kv heads, D)
    values = value[0].transpose(0, 1).index_select(0, packed_keys)
    attend = attention_of_segments if query.is_cuda else sdpa_of_segments
    outputs = attend(queries, keys, values, query_lengths, key_lengths, scaling)
    return outputs.unsqueeze(0), None


def attention_of_segments(queries, keys, values, query_lengths, key_lengths, scaling):
    """(M, heads, D): causal attention in each segment, aligned at its last query and last key."""

    def ends(lengths: list[int]) -> Tensor:
        return F.pad(torch.tensor(lengths), (1, 0)).cumsum(0).int().to(queries.device)

    return varlen_attn(
        queries,
        keys,
        values,
        ends(query_lengths),
        ends(key_lengths),
        max(query_lengths),
        max(key_lengths),
        scale=scaling,
        window_size=(-1, 0),  # causal
        enable_gqa=True,
    )


def sdpa_of_segments(queries, keys, values, query_lengths, key_lengths, scaling):
    """The same one by one, for the check at load, which runs on a CPU."""
    outputs = []
    for q, k, v in zip(
        queries.split(query_lengths),
        keys.split(key_lengths),
        values.split(key_lengths),
        strict=True,
    ):
        is_seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
        is_seen = is_seen.tril(len(k) - len(q))
        q, k, v = (states.transpose(0, 1).unsqueeze(0) for states in (q, k, v))
        output = F.scaled_dot_product_attention(
            q, k, v, attn_mask=is_seen, scale=scaling, enable_gqa=True
        )
        outputs.append(output.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def mask_unless_packed(attention_mask=None, **options):
    """A packed row needs no mask, nor does any other row without padding."""
    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **options)


AttentionInterface.register(ATTENTION, packed_or_sdpa)
AttentionMaskInterface.register(ATTENTION, mask_unless_packed)


def is_on(model: PreTrainedModel) -> bool:
    return model.config._attn_implementation == ATTENTION
