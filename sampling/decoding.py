"""The decode step: one more token for every row of a batch.

Its memory is allocated before the first step, and during a step no value is copied from the GPU to
Python, which would make the GPU wait and could not be captured. One function can therefore run on a
CPU, on the meta device in a test, and on CUDA, where it is captured as a graph.

Shapes: R rows of N prompts, P prompt tokens, S slots, H hidden size, D head size, V vocabulary. A
token's slot is its column number. It is the same in the keys, values, tokens, log-probs and random
numbers of its row. The prompt, padded on the left, takes the first P slots. A cell is one slot of
one row.
"""

from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# --- Attention of one query token -----------------------------------------------------------------

ATTENTION = "sdpa_or_products"  # the name under which transformers finds the two functions below


def sdpa_or_products(module, query, key, value, attention_mask, scaling=None, **options):
    """Attention by SDPA; for one query token on a CPU by two matrix products, 3 times as fast."""
    if query.device.type != "cpu" or query.shape[2] > 1:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
    R, num_heads, _, D = query.shape
    num_kv_heads = key.shape[1]
    if scaling is None:
        scaling = D**-0.5
    # Query heads that share their keys and values stand together.
    queries = query.reshape(R, num_kv_heads, -1, D) * scaling
    scores = queries @ key.mT  # (R, kv heads, query heads of each, S)
    if attention_mask is not None:
        scores = scores + attention_mask
    probs = scores.softmax(-1, dtype=torch.float32)
    outputs = probs.to(value.dtype) @ value
    return outputs.reshape(R, 1, num_heads, -1), None


def additive_mask(q_length, attention_mask, local_size=None, dtype=torch.float32, **options):
    """(R, 1, 1, S): what is added to the scores of one query token, 0 or minus infinity.

    transformers' mask function would copy a value from the GPU to Python, so this one replaces it
    for one query token. For several query tokens it calls transformers' function.

    Args:
        attention_mask: (R, S) bool, False on padding and on slots that are still to come.
        local_size: the size of the layer's sliding window, if it has one.
    """
    if q_length > 1 or attention_mask is None:
        return sdpa_mask(
            q_length=q_length, attention_mask=attention_mask, local_size=local_size, **options
        )
    if local_size:
        slots = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        last_slot = (slots * attention_mask).amax(1, keepdim=True)  # (R, 1)
        attention_mask = attention_mask & (slots > last_slot - local_size)
    zeros = torch.zeros_like(attention_mask, dtype=dtype)
    return zeros.masked_fill_(~attention_mask, -torch.inf)[:, None, None]


AttentionInterface.register(ATTENTION, sdpa_or_products)
AttentionMaskInterface.register(ATTENTION, additive_mask)


# --- Keys and values ------------------------------------------------------------------------------


class StateMemory:
    """Memory for one layer's keys, or for its values, of all rows.

    The tensor in it is always contiguous, since matrix products would copy a view that is not.
    """

    def __init__(self, reserved_cells: int):
        self.reserved_cells = reserved_cells  # memory is made for this many cells at least
        self.flat = torch.empty(0)

    def hold(self, states: Tensor, num_slots: int, repeats: int) -> Tensor:
        """Copy every row of states (N, heads, used slots, D) into the memory `repeats` times.

        The memory stays where it is if it suffices; otherwise new memory is made.

        Returns:
            (N * repeats, heads, num_slots, D), a view of the memory.
        """
        N, heads, num_used_slots, D = states.shape
        num_elements = N * repeats * heads * num_slots * D
        if self.flat.numel() < num_elements:
            num_cells = max(N * repeats * num_slots, self.reserved_cells)
            self.flat = states.new_empty(num_cells * heads * D)
        elif states.data_ptr() == self.flat.data_ptr():
            # The states are a view of this memory: copy them before it is overwritten.
            states = states.clone()
        elements = self.flat[:num_elements]
        copies = elements.view(N, repeats, heads, num_slots, D)
        copies[:, :, :, :num_used_slots] = states.unsqueeze(1)
        # Free slots are masked, but memory that nobody wrote can hold NaN, and 0 times NaN is NaN.
        copies[:, :, :, num_used_slots:] = 0
        return copies.flatten(0, 1)


class SlotLayer(DynamicLayer):
    """One layer's keys and values, (R, heads, S, D) each; a step writes one slot of all rows."""

    def __init__(self, slot: Tensor, reserved_cells: int):
        super().__init__()
        self.slot = slot
        self.key_memory = StateMemory(reserved_cells)
        self.value_memory = StateMemory(reserved_cells)

    def hold(self, keys: Tensor, values: Tensor, num_slots: int, repeats: int) -> None:
        """Hold every row of (N, heads, used slots, D) `repeats` times, in num_slots slots."""
        self.keys = self.key_memory.hold(keys, num_slots, repeats)
        self.values = self.value_memory.hold(values, num_slots, repeats)

    def update(self, key_states, value_states, *args, **kwargs):
        """transformers calls this with the new token's keys and values, (R, heads, 1, D) each.

        Under autocast keys are float32, because the rotary factors are, but values are bfloat16.
        The prompt's cache holds both in float32.
        """
        self.keys.index_copy_(2, self.slot, key_states.to(self.keys.dtype))
        self.values.index_copy_(2, self.slot, value_states.to(self.values.dtype))
        return self.keys, self.values

    def get_mask_sizes(self, query_length):
        """transformers asks for the number of slots that a mask covers, and for the first one."""
        return self.keys.shape[2], 0


# --- Drawing tokens -------------------------------------------------------------------------------

# A vocabulary of at most this size is searched in one level: two levels would not be faster.
SMALL_VOCABULARY = 2**13
# The second level searches one block of so many probabilities.
BLOCK = 128


def draw_tokens(probs: Tensor, uniforms: Tensor) -> Tensor:
    """(R, 1): a token for each row, by inversion of the distribution function.

    It is the first token up to which the cumulative probability is at least the uniform random
    number. A cumulative sum of all of a large vocabulary would be slow, since it is as large as the
    probabilities twice over. So the search first finds a block of tokens by the sums of the blocks,
    and then the token in it. The sums are rounded in another order then. A random number within
    about 1e-16 of the boundary between two tokens may draw the other one.

    Args:
        probs: (R, V) float32. Their sum need not be exactly 1.
        uniforms: (R, 1) float64 in (0, 1], so that a token of probability 0 is never drawn.
    """
    V = probs.shape[1]
    if V <= SMALL_VOCABULARY:
        # A GPU's cumulative sum in float32 would not be quite monotonic.
        cumulative = probs.cumsum(-1, dtype=torch.float64)
        token = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:])
        # If the probabilities are NaN, the search ends after the last token.
        return token.clamp(max=V - 1)
    if V % BLOCK:
        probs = F.pad(probs, (0, -V % BLOCK))
    blocks = probs.unflatten(1, (-1, BLOCK))  # (R, number of blocks, BLOCK)
    block_sums = blocks.sum(-1, dtype=torch.float64)
    target = uniforms * block_sums.sum(-1, keepdim=True)
    block, rest = _first_to_reach(target, block_sums)
    probs_in_block = blocks.take_along_dim(block.unsqueeze(-1), dim=1).squeeze(1)  # (R, BLOCK)
    token_in_block, _ = _first_to_reach(rest, probs_in_block.double())
    return block * BLOCK + token_in_block


def _first_to_reach(target: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Where the cumulative sum of weights (R, n) first reaches a target (R, 1) above 0.

    An entry of weight 0 is never taken, whatever the rounding: a GPU adds in an order in which the
    cumulative sum may rise or fall by a rounding error there. The first entry is taken if the
    weights are NaN.

    Returns:
        The entry's index, and what the entries before it leave of the target, (R, 1) each.
    """
    cumulative = weights.cumsum(-1)
    reached = cumulative.where(weights > 0, 0)
    # The target is a sum in another order, which rounding may have made greater than this one.
    target = target.minimum(reached.amax(-1, keepdim=True))
    index = (reached >= target).int().argmax(-1, keepdim=True)
    rest = target - (cumulative - weights).gather(-1, index)
    return index, rest.clamp(min=torch.finfo(rest.dtype).tiny)


# --- The decode step ------------------------------------------------------------------------------


class Decoder:
    """The rows that are sampled together, and the step that gives each of them one more token."""

    reserved_cells = 0  # memory for keys and values is made for this many cells at least

    def __init__(self, model: PreTrainedModel, max_rows: int, max_slots: int):
        """Set aside memory for at most max_rows rows and max_slots slots.

        The keys and values get theirs when they are first held.
        """
        device = model.device
        if device.type == "cpu":
            self.check_interval = 1  # check for ended completions every this many steps
            block = 32
        else:
            self.check_interval = 8  # a check makes the GPU wait for Python
            block = 128
        self.max_rows = max_rows
        # The sizes, in slots, that the memory of keys and values may have as it grows. The last one
        # is max_slots rounded up, and all other memory is made for so many slots too: a decoder
        # that is kept must hold what its last size promises.
        self.slot_counts = range(block, max_slots + block, block)
        self.max_slots = self.slot_counts[-1]
        # The slot of every row's last token, which has not run through the model yet.
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        # Padding tokens before each row's prompt.
        self.padding = torch.zeros(max_rows, 1, dtype=torch.long, device=device)
        self.tokens = torch.zeros(max_rows, self.max_slots, dtype=torch.long, device=device)
        self.logps = torch.zeros(max_rows, self.max_slots, device=device)
        # Random numbers in (0, 1] for the draws.
        self.uniforms = torch.zeros(max_rows, self.max_slots, dtype=torch.float64, device=device)
        self.cache = DynamicCache()

    def start(self, cache: DynamicCache, prompt_mask: Tensor, uniforms: Tensor) -> None:
        """Begin with N prompts that have run: R / N rows for each of them.

        Args:
            cache: the prompts' keys and values.
            prompt_mask: (N, P), 0 on padding.
            uniforms: (R, n) random numbers in (0, 1] for the draws of n tokens.
        """
        R, num_draws = uniforms.shape
        N, P = prompt_mask.shape
        repeats = R // N
        if not self.cache.layers:
            self.cache.layers = [SlotLayer(self.slot, self.reserved_cells) for _ in cache.layers]
        self.fit(cache, P, repeats)
        padding = P - prompt_mask.sum(1, keepdim=True)  # (N, 1)
        self.padding[:R] = padding.repeat_interleave(repeats, dim=0)
        self.uniforms[:R, P : P + num_draws] = uniforms
        self.slot.fill_(P)

    def fit(
        self,
        cache: DynamicCache,
        num_used_slots: int,
        repeats: int = 1,
        rows: Tensor | slice = slice(None),
    ) -> None:
        """Hold the given rows of a cache `repeats` times, with at least one free slot."""
        num_slots = next(count for count in self.slot_counts if count > num_used_slots)
        for slot_layer, layer in zip(self.cache.layers, cache.layers, strict=True):
            keys = layer.keys[rows, :, :num_used_slots]
            values = layer.values[rows, :, :num_used_slots]
            slot_layer.hold(keys, values, num_slots, repeats)

    def keep_rows(self, rows: Tensor, num_used_slots: int) -> None:
        """Go on with the given rows alone, in that order."""
        self.fit(self.cache, num_used_slots, rows=rows)
        for state in (self.padding, self.tokens, self.logps, self.uniforms):
            state[: len(rows)] = state[rows]

    @property
    def size(self) -> tuple[int, int]:
        """(R, S): the rows and slots that a step goes over."""
        R, _, S, _ = self.cache.layers[0].keys.shape
        return R, S

    def step(self, model: PreTrainedModel, temperature: float) -> None:
        """Run the last token of each row, and draw the next one."""
        R, S = self.size
        slots = torch.arange(S, device=self.slot.device)
        attention_mask = (slots >= self.padding[:R]) & (slots <= self.slot)  # (R, S)
        if model.config._attn_implementation != ATTENTION:  # then the model makes no such mask
            attention_mask = additive_mask(1, attention_mask, dtype=model.dtype)
        outputs = model.get_decoder()(
            self.tokens[:R].index_select(1, self.slot),
            attention_mask=attention_mask,
            position_ids=self.slot - self.padding[:R],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.slot += 1
        self.draw(model, outputs.last_hidden_state[:, -1], temperature)

    def draw(self, model: PreTrainedModel, hidden: Tensor, temperature: float) -> None:
        """Draw a token for each row from its last hidden state (R, H), and write it at the slot.

        With temperature 0 it is the most probable token.
        """
        R = len(hidden)
        logits = model.get_output_embeddings()(hidden).float()  # (R, V)
        if temperature not in (0, 1):  # a division by 1 would copy the logits in vain
            logits = logits / temperature
        probs = logits.softmax(-1)
        if temperature:
            uniforms = self.uniforms[:R].index_select(1, self.slot)  # (R, 1)
            token = draw_tokens(probs, uniforms)
        else:
            token = probs.argmax(-1, keepdim=True)
        self.tokens[:R].index_copy_(1, self.slot, token)
        self.logps[:R].index_copy_(1, self.slot, probs.gather(1, token).log())


# --- CUDA graphs: one launch for a step instead of thousands --------------------------------------
# This section has not been run on a GPU yet. On a GPU, selfcheck.py compares captured steps with
# ordinary ones.


class CapturedDecoder(Decoder):
    """A decoder whose steps are captured as CUDA graphs.

    There is one graph for each number of rows, number of slots and temperature. It is captured when
    these first come up, and replayed from then on.
    """

    MAX_GRAPHS = 100  # a step that would need another one is an ordinary step

    def __init__(self, model, max_rows, max_slots):
        super().__init__(model, max_rows, max_slots)
        self.graphs = {}
        self.uses_graphs = True  # until a capture fails
        self.capture_stream = None
        # The memory that a graph reads and writes must never move, so all of it is made at once.
        self.reserved_cells = max_rows * self.max_slots

    def step(self, model, temperature):
        key = (*self.size, temperature)
        is_new = key not in self.graphs
        if self.uses_graphs and is_new and len(self.graphs) < self.MAX_GRAPHS:
            start_slot = self.slot.clone()
            try:
                self.graphs[key] = self._capture(model, temperature, start_slot)
            except torch.OutOfMemoryError:
                raise  # with fewer rows at a time, graphs may fit
            except RuntimeError as error:
                # The model's code copies a value to Python, or the driver refuses.
                reason = " ".join(str(error).split())[:200]
                print(f"sampling without CUDA graphs, which is slower: {reason}")
                self.uses_graphs = False
            self.slot.copy_(start_slot)  # trial steps have moved it, also if the capture failed
        if self.uses_graphs and key in self.graphs:
            self.graphs[key].replay()
        else:
            super().step(model, temperature)

    def _capture(self, model, temperature, start_slot):
        """A graph of the step, after two trial steps whose writes the real step overwrites."""
        if self.capture_stream is None:
            self.capture_stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        main_stream = torch.cuda.current_stream()
        debug_mode = torch.cuda.get_sync_debug_mode()
        self.capture_stream.wait_stream(main_stream)
        try:
            with torch.cuda.stream(self.capture_stream):
                super().step(model, temperature)  # chooses kernels and makes workspaces
                self.slot.copy_(start_slot)
                # If the step copies a value to Python, it raises here, which is harmless; an error
                # during the capture would leave the capture unfinished.
                torch.cuda.set_sync_debug_mode("error")
                super().step(model, temperature)
        finally:
            torch.cuda.set_sync_debug_mode(debug_mode)
            main_stream.wait_stream(self.capture_stream)
        self.slot.copy_(start_slot)
        # All graphs share one memory pool, since they run one at a time.
        pool = next((earlier_graph.pool() for earlier_graph in self.graphs.values()), None)
        with (
            torch.cuda.stream(main_stream),
            torch.cuda.graph(graph, pool, self.capture_stream, capture_error_mode="thread_local"),
        ):
            super().step(model, temperature)
        return graph


# A graph knows the addresses of its memory, so a model's decoder is kept from call to call.
CAPTURED_DECODERS: WeakKeyDictionary[PreTrainedModel, CapturedDecoder] = WeakKeyDictionary()
MODELS_WITHOUT_GRAPHS: WeakSet[PreTrainedModel] = WeakSet()  # of which a line has been printed


def decoder_for(
    model: PreTrainedModel, cache: DynamicCache, num_rows: int, num_slots: int
) -> Decoder:
    """A decoder for so large a batch, and for keys and values like those in the cache.

    On CUDA it is the captured decoder that was kept for this model, or a new one, unless its memory
    would be too large. Only a bfloat16 copy is captured. With float32 weights, autocast caches
    bfloat16 casts of them, and a graph would go on reading old ones.
    """
    if model.device.type != "cuda" or model.dtype != torch.bfloat16:
        return Decoder(model, num_rows, num_slots)
    sizes = [(num_rows, num_slots)]
    earlier = CAPTURED_DECODERS.get(model)
    if earlier is not None:
        if earlier.max_rows >= num_rows and earlier.max_slots >= num_slots:
            return earlier
        grown_size = (max(num_rows, earlier.max_rows), max(num_slots, earlier.max_slots))
        sizes.insert(0, grown_size)  # tried first: a decoder for all calls so far
    bytes_per_cell = 0
    for layer in cache.layers:
        for states in (layer.keys, layer.values):
            _, heads, _, D = states.shape
            bytes_per_cell += heads * D * states.element_size()
    # The memory of keys and values stays while the loss runs, so that it must not be too much.
    max_bytes = torch.cuda.get_device_properties(model.device).total_memory / 8
    for max_rows, max_slots in sizes:
        decoder = CapturedDecoder(model, max_rows, max_slots)
        if decoder.reserved_cells * bytes_per_cell <= max_bytes:
            CAPTURED_DECODERS[model] = decoder
            return decoder
    if model not in MODELS_WITHOUT_GRAPHS:
        MODELS_WITHOUT_GRAPHS.add(model)
        num_fitting_rows = int(max_bytes / bytes_per_cell / decoder.max_slots)
        print(
            "sampling without CUDA graphs, which is two to three times slower: keys and values of"
            f" {num_rows} rows and {decoder.max_slots} slots would take more than an eighth of the"
            f" GPU's memory; --max_concurrent_sequences {max(1, num_fitting_rows)} samples with"
            " graphs"
        )
    return Decoder(model, num_rows, num_slots)
