"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

FILE = "ctc_drafter.py"
TESTS = ["test_ctc_drafter.py", "test_families.py"]
MUTANTS = [
    (
        FILE,
        "upto = anchors.repeat_interleave(slots, dim=1)[..., None] >= rows",
        "upto = anchors.repeat_interleave(slots, dim=1)[..., None] + 1 >= rows",
        "slot mask: sees a row ahead",
    ),
    (
        FILE,
        "own = (group[:, None] == group)",
        "own = (group[:, None] >= group)",
        "slot mask: sees other anchors",
    ),
    (FILE, 'frames, counts, blank, "sum"', 'frames, counts, 0, "sum"', "loss: blank"),
    (
        FILE,
        "learns = batch.loss_mask & (torch.arange(length, device=device) >= 2)",
        "learns = batch.loss_mask.clone()",
        "windows: rows that are not there",
    ),
    (
        FILE,
        "used = learns[sequence, places] & inside",
        "used = inside",
        "windows: learns prompts",
    ),
    (
        FILE,
        "torch.Generator().manual_seed(seed)",
        "torch.Generator().manual_seed(0)",
        "windows: the same anchors in every step",
    ),
    (
        FILE,
        "used[..., 1:] &= agrees[sequence, places][..., :-1]",
        "used &= agrees[sequence, places]",
        "cut labels: the label at the difference is dropped too",
    ),
    (
        FILE,
        "agrees = drafter.draft_ids[best] == input_ids",
        "agrees = best == input_ids",
        "cut labels: indices compared with ids",
    ),
    (
        FILE,
        "weight = 0.8**place * (place < counts[:, None])",
        "weight = (place < counts[:, None]) + 0.0",
        "Medusa: weights",
    ),
    (
        FILE,
        'self.num_slots = config.slots if config.kind == "ctc" else config.window',
        "self.num_slots = config.slots",
        "transformer and Medusa: more slots than tokens",
    ),
    (
        FILE,
        "if symbol != previous and symbol != blank:",
        "if symbol != blank:",
        "collapse: repeats stay",
    ),
    (
        FILE,
        "entering = in_blank[prefix] * q",
        "pass",
        "prefix search: repeats without a blank",
    ),
    (
        FILE,
        "combination[: (*combination, blank).index(blank)]",
        "tuple(symbol for symbol in combination if symbol != blank)",
        "Medusa verify: goes on behind a blank",
    ),
    (FILE, "and parent in place:", "and True:", "trie: orphans"),
    (FILE, "or worth[prefix] < least_worth:", "or False:", "trie: worthless prefixes"),
    (FILE, "memory.cache.crop(-slots)", "pass", "drafting: slots stay in the cache"),
    (
        FILE,
        "log_q[:, :-1, -1].cumsum(-1), (1, 0)",
        "log_q[:, :-1, -1], (1, 0)",
        "alpha: only the slot before must be blank",
    ),
    (
        FILE,
        "total = total - drafter.config.first_token * (",
        "total = total - (",
        "first token: weight",
    ),
    (
        FILE,
        "newest = batch.hidden[sequence, anchors + 1]",
        "newest = batch.hidden[sequence, anchors]",
        "first token: the target's distribution one place early",
    ),
    (
        FILE,
        "draft = lookup.merge(draft, input_ids, room)",
        "lookup.merge(draft, input_ids, room)",
        "copies: found and thrown away",
    ),
    (
        FILE,
        '"least_worth": least_worth, "copies": copies}',
        '"least_worth": least_worth}',
        "copies: the option is not read",
    ),
    (
        FILE,
        "room = generation_config.max_length - input_ids.shape[1] - 1",
        "room = generation_config.max_length - input_ids.shape[1]",
        "drafting: no room left for the bonus token",
    ),
    (FILE, "    if not len(counts):", "    if False:", "loss: a batch in which no anchor teaches"),
    (
        "ctc_drafter.py",
        "return total / len(counts) * batch.loss_mask.sum()",
        "return total * 1.0",
        "loss: a sum over anchors, not their mean",
    ),
    (
        "ctc_drafter.py",
        "return common.target_logits(target, newest).softmax(-1)[..., drafter.draft_ids]",
        "return common.target_logits(target, newest, drafter.draft_ids).softmax(-1)",
        "first token: over the draft vocabulary only",
    ),
    (
        FILE,
        "input_ids, done = common.commit(input_ids, tokens, stopping_criteria, stats, token_streamer)",
        "input_ids, done = common.commit(input_ids, tokens, stopping_criteria, stats)",
        "token_streamer is accepted and gets nothing",
    ),
    (
        FILE,
        "        memory.cache.crop(-slots)\n",
        "        pass\n",
        "drafting: the slots of former rounds are never taken out of the cache",
    ),
    (
        FILE,
        "worth = prefix_search(q_slots, symbols, candidates)",
        "worth = prefix_search(q_slots, candidates, symbols)",
        "symbols and candidates exchanged",
    ),
]
