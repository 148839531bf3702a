"""The decode step: one more token for every sequence of a batch.

Shapes: R sequences of N prompts, P prompt tokens, S columns of the KV cache, H hidden size, D head
size, V vocabulary. Prompts are padded on the left, so that a step writes to the same column of the
cache for every sequence.
"""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import utils

# At most this many tokens of prompts run at a time: so few that these are about equally long.
CHUNK_TOKENS = 4_096


class Decoder:
    """The KV cache of a batch, and the step that gives each of its sequences one more token."""

    columns_per_block = 32  # the cache grows by so many columns at a time

    def __init__(self, device: torch.device, max_rows: int):
        self.max_rows = max_rows
        # The column of every sequence's last token, which has not run through the model yet.
        self.column = torch.zeros(1, dtype=torch.long, device=device)

    def start(
        self, model: PreTrainedModel, prompts: list[list[int]], prompt_of_row: Tensor
    ) -> Tensor:
        """Run N prompts once, and begin R sequences; prompt_of_row (R,) says after which of them.

        Returns:
            (R, H) the last hidden states.
        """
        self.cache = DynamicCache()  # the memory of an earlier batch is free from here on
        layers, last_hidden = run_prompts(model, prompts)
        lengths = [len(prompt) for prompt in prompts]
        P = max(lengths)
        self.column.fill_(P)
        self.num_used_columns = P
        # How many columns there are before each prompt: (N, 1).
        self.padding = P - torch.tensor(lengths, device=model.device).unsqueeze(1)
        self.cache.layers = [KVLayer(keys, values, self.column) for keys, values in layers]
        self._add_columns()
        self.select(prompt_of_row)
        return last_hidden[prompt_of_row]

    def select(self, rows: Tensor) -> None:
        """Go on with the given sequences in their order; one may be given several times."""
        self.padding = self._store("padding", self.padding[rows])
        for i, layer in enumerate(self.cache.layers):
            layer.keys = self._store(("keys", i), layer.keys.index_select(0, rows))
            layer.values = self._store(("values", i), layer.values.index_select(0, rows))

    def _add_columns(self) -> None:
        """Make room for more tokens where every column is used.

        Free columns are masked, but they must be zeros, since 0 times a NaN would be NaN.
        """
        num_free = self.columns_per_block - self.num_used_columns % self.columns_per_block
        for i, layer in enumerate(self.cache.layers):
            layer.keys = self._store(("keys", i), F.pad(layer.keys, (0, 0, 0, num_free)))
            layer.values = self._store(("values", i), F.pad(layer.values, (0, 0, 0, num_free)))

    def _store(self, name, states: Tensor) -> Tensor:
        """Where a new state of the decoder is held; CapturedDecoder has memory for each name."""
        return states

    @property
    def size(self) -> tuple[int, int]:
        """(R, S): the sequences and columns that a step goes over."""
        R, _, S, _ = self.cache.layers[0].keys.shape
        return R, S

    def step(
        self, model: PreTrainedModel, token: Tensor, uniforms: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Run each sequence's last token, and draw the next: its id and log-prob; all (R,)."""
        if self.num_used_columns == self.size[1]:
            self._add_columns()
        next_token, logp = self._run(model, token, uniforms, temperature)
        self.column += 1
        self.num_used_columns += 1
        return next_token, logp

    def _run(self, model, token, uniforms, temperature):
        """The step itself. It copies nothing from the GPU to Python, which no graph could hold."""
        _, S = self.size
        columns = torch.arange(S, device=token.device)
        attention_mask = (columns >= self.padding) & (columns <= self.column)  # (R, S)
        if model.config._attn_implementation != ATTENTION:  # then the model makes no such mask
            attention_mask = additive_mask(1, attention_mask, dtype=model.dtype)
        outputs = model.get_decoder()(
            token.unsqueeze(1),
            attention_mask=attention_mask,
            position_ids=self.column - self.padding,
            past_key_values=self.cache,
            use_cache=True,
        )
        return draw(model, outputs.last_hidden_state[:, -1], uniforms, temperature)


def run_prompts(
    model: PreTrainedModel, prompts: list[list[int]]
) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Run N prompts in chunks of similar length; what all of them begin with runs once.

    Returns:
        the keys and values of each layer, (N, heads, P, D) each, padded on the left, and the last
        hidden states (N, H).
    """
    decoder = model.get_decoder()
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=model.device)
    # Here the padding follows the prompts, where no token of theirs sees it.
    ids = pad_sequence([torch.tensor(prompt) for prompt in prompts], batch_first=True)
    ids = ids.to(model.device)  # (N, P)
    N, P = ids.shape
    is_common = (ids == ids[0]).all(0)
    num_common = int(is_common.cumprod(0).sum())
    num_common = min(num_common, min(map(len, prompts)) - 1)
    is_seen = torch.ones_like(ids)
    common_cache = DynamicCache()
    if num_common:
        decoder(
            ids[:1, :num_common],
            attention_mask=is_seen[:1, :num_common],
            past_key_values=common_cache,
            use_cache=True,
        )
    caches = []
    last_hidden = []
    by_length = lengths.argsort(descending=True, stable=True)
    for rows in by_length.split(max(1, CHUNK_TOKENS // P)):
        longest = int(lengths[rows].max())
        cache = deepcopy(common_cache)  # it keeps every position, not only a sliding window
        cache.batch_repeat_interleave(len(rows))
        outputs = decoder(
            ids[rows, num_common:longest],
            attention_mask=is_seen[rows, :longest],
            past_key_values=cache,
            use_cache=True,
        )
        caches.append(cache)
        hidden = outputs.last_hidden_state
        last = lengths[rows] - num_common - 1
        last_hidden.append(hidden[torch.arange(len(rows), device=ids.device), last])
    columns = torch.arange(P, device=model.device)
    padding = P - lengths.unsqueeze(1)
    padding_first = ((columns - padding) % P)[:, None, :, None]
    in_order = by_length.argsort()

    def joined(chunks: list[Tensor]) -> Tensor:
        chunks = [F.pad(states, (0, 0, 0, P - states.shape[2])) for states in chunks]
        return torch.cat(chunks)[in_order].take_along_dim(padding_first, 2)

    layers = []
    for chunks in zip(*(cache.layers for cache in caches), strict=True):
        keys = joined([layer.keys for layer in chunks])
        values = joined([layer.values for layer in chunks])
        layers.append((keys, values))
    return layers, torch.cat(last_hidden)[in_order]


class KVLayer(DynamicLayer):
    """One layer's keys and values, (R, heads, S, D) each; a step writes one column of them."""

    def __init__(self, keys: Tensor, values: Tensor, column: Tensor):
        super().__init__()
        self.keys = keys
        self.values = values
        self.column = column

    def update(self, key_states, value_states, *args, **kwargs):
        """Write the new token's keys and values, (R, heads, 1, D) each; transformers calls this."""
        # Under autocast the new values are bfloat16, and all the others float32.
        self.keys.index_copy_(2, self.column, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.column, value_states.to(self.values.dtype))
        return self.keys, self.values

    def get_mask_sizes(self, query_length):
        """The number of columns that a mask covers, and the first one; transformers calls this."""
        return self.keys.shape[2], 0


# --- Drawing tokens -------------------------------------------------------------------------------


def draw(
    model: PreTrainedModel, hidden: Tensor, uniforms: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Draw a token for each sequence from its last hidden state (R, H): ids and log-probs, (R,).

    With temperature 0 it is the most probable token, and its log-prob that of temperature 1.
    """
    is_greedy = temperature == 0
    divisor = 1.0 if is_greedy else temperature
    output_layer = model.get_output_embeddings()
    logits = utils.compute_logits(hidden, output_layer.weight, output_layer.bias, divisor)
    probs = logits.softmax(-1)  # (R, V)
    token = probs.argmax(-1) if is_greedy else draw_tokens(probs, uniforms)
    token_probs = probs.gather(1, token.unsqueeze(1)).squeeze(1)
    return token, token_probs.log()


def draw_tokens(probs: Tensor, uniforms: Tensor) -> Tensor:
    """(R,) ids: the first token up to which the cumulative probability reaches a random number.

    Args:
        probs: (R, V) float32. Their sum need not be exactly 1.
        uniforms: (R,) float64 in (0, 1], so that a token of probability 0 is never drawn.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    targets = uniforms.unsqueeze(1) * cumulative[:, -1:]
    token = torch.searchsorted(cumulative, targets).squeeze(1)
    return token.clamp(max=probs.shape[1] - 1)  # if all are NaN, the search ends beyond the last


# --- Attention on a CPU ---------------------------------------------------------------------------

ATTENTION = "sdpa_or_products"  # the name under which transformers finds the two functions below

# More scores than this (256 MiB) are left to SDPA, which never holds them all.
MAX_SCORES = 2**26


def prefers_products(device: torch.device, query_length: int) -> bool:
    """Whether products are faster than SDPA: on a CPU for one query token, and where oneDNN is on.

    Of oneDNN's many small products, SDPA's kernel for CPUs becomes 2 to 5 times as slow.
    """
    return device.type == "cpu" and (query_length == 1 or utils.has_onednn_products())


@torch.autocast("cpu", enabled=False)
def sdpa_or_products(module, query, key, value, attention_mask, scaling=None, **options):
    """Attention by SDPA, or by two matrix products where these are faster.

    On a CPU it has the precision of the queries, also under autocast, which would round scores.
    """
    if query.device.type == "cpu":
        value = value.to(query.dtype)
    R, num_heads, T, D = query.shape
    num_kv_heads, S = key.shape[1:3]
    is_small = R * num_heads * T * S <= MAX_SCORES
    if attention_mask is None or not (prefers_products(query.device, T) and is_small):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    assert attention_mask.shape[1] == 1, "a mask of its own for each head, which chooses keys"
    if attention_mask.dtype == torch.bool:  # without padding transformers gives this one
        attention_mask = torch.where(attention_mask, 0.0, -torch.inf).to(query.dtype)
    if scaling is None:
        scaling = D**-0.5
    # Query heads that share their keys and values are next to each other.
    queries = (query * scaling).reshape(R, num_kv_heads, -1, D)
    scores = (queries @ key.mT).view(R, num_heads, T, S) + attention_mask
    probs = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    outputs = probs.view(R, num_kv_heads, -1, S) @ value
    return outputs.reshape(R, num_heads, T, value.shape[-1]).transpose(1, 2), None


def additive_mask(q_length, attention_mask, local_size=None, dtype=torch.float32, **options):
    """What is added to the scores of products: (R, 1, 1, S) for one query token, or (R, 1, T, S).

    For one query token transformers' mask function would copy a value from the GPU to Python. For
    several, it gives the mask, of SDPA's kind where that is used.

    Args:
        attention_mask: (R, S) bool, False on padding and on columns that are still free. None, as
            transformers' own `generate` may give, if there are none of these.
        local_size: the size of the layer's sliding window, if it has one.
    """
    options |= dict(q_length=q_length, attention_mask=attention_mask, local_size=local_size)
    if attention_mask is None:
        return sdpa_mask(**options)
    if q_length > 1 and not prefers_products(attention_mask.device, q_length):
        return sdpa_mask(**options)
    if q_length > 1:
        options["allow_is_causal_skip"] = False
        mask = sdpa_mask(**options)
        # Not minus infinity, since a row of padding may see nothing, and would be NaN.
        return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    if local_size:
        columns = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        last_column = (columns * attention_mask).amax(1, keepdim=True)  # (R, 1)
        attention_mask = attention_mask & (columns > last_column - local_size)
    return torch.where(attention_mask, 0.0, -torch.inf).to(dtype)[:, None, None]


AttentionInterface.register(ATTENTION, sdpa_or_products)
AttentionMaskInterface.register(ATTENTION, additive_mask)
