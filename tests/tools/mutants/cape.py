"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_cape.py"]
MUTANTS = [
    (
        "cape.py",
        "above = [step - 1 for step, _ in places]",
        "above = [step for step, _ in places]",
        "mask: sets one too deep",
    ),
    ("cape.py", "bisect.bisect_left(bounds", "bisect.bisect_right(bounds", "set_size: bounds"),
    (
        "cape.py",
        "chosen = heapq.nlargest(room, candidates)",
        "chosen = candidates",
        "no limit of tokens",
    ),
    (
        "cape.py",
        "chosen = heapq.nlargest(room, candidates)",
        "chosen = candidates[:room]",
        "the limit drops the last extras, not the least likely",
    ),
    (
        "cape.py",
        "worth = reached * probability\n",
        "worth = probability\n",
        "worth: not how likely the round gets there",
    ),
    (
        "cape.py",
        "worth = reached * probability\n",
        "worth = reached * chance[step] * probability\n",
        "the worth of an extra one step late",
    ),
    (
        "cape.py",
        "return common.Draft(tokens, parents, q_draft if do_sample else None)",
        "q_draft = torch.cat([q_draft, q_draft[-1:].expand(len(extras), -1)])\n"
        "    return common.Draft(tokens, parents, q_draft if do_sample else None)",
        "sampling: extras claim to be sampled",
    ),
    (
        "cape.py",
        "others = q_draft.scatter(1, drafted, 0.0)",
        "others = q_draft",
        "sets hold the trajectory",
    ),
    (
        "cape.py",
        "enumerate(probabilities[step][: counts[step]])",
        "enumerate(probabilities[step])",
        "every step gets the largest size",
    ),
    (
        "cape.py",
        "generation_config.max_length - input_ids.shape[1] - 1",
        "generation_config.max_length - input_ids.shape[1]",
        "no room left for the bonus token",
    ),
    (
        "cape.py",
        "if reached * float(q_draft.max()) <= least_worth:",
        "if reached * float(q_draft[token]) <= least_worth:",
        "the trajectory is cut by the drawn token",
    ),
    (
        "cape.py",
        "if reached * float(q_draft.max()) <= least_worth:",
        "if float(q_draft.max()) <= least_worth:",
        "the trajectory is cut by its confidence alone",
    ),
    (
        "cape.py",
        "        if reached <= least_worth:  # the next step cannot pay: save its pass of the drafter\n"
        "            return\n",
        "",
        "a pass of the drafter that cannot pay",
    ),
    (
        "cape.py",
        "            if worth > least_worth:\n",
        "            if True:\n",
        "worthless extras",
    ),
    (
        "cape.py",
        "        beams = heapq.nlargest(width, grown)\n",
        "        beams = heapq.nlargest(width, grown + beams)\n",
        "beams: shorter proposals stay",
    ),
    (
        "cape.py",
        "grown.append((score + math.log(probability), [*path, token]))",
        "grown.append((math.log(probability), [*path, token]))",
        "beams: by their last token only",
    ),
    (
        "cape.py",
        "if prefix not in node_of:",
        "if True:",
        "beams: what they share is verified twice",
    ),
    (
        "cape.py",
        "            draft = lookup.merge(draft, input_ids, room)\n",
        "",
        "copies are left out",
    ),
    (
        "cape.py",
        "stats.note(confidences=confidences, counts=counts)",
        "pass",
        "nothing is noted of a round",
    ),
    (
        "cape.py",
        "stats.note(q_nodes=chance + [probabilities[step][rank] for step, rank in places])",
        "stats.note(q_nodes=chance + [probabilities[step][0] for step, rank in places])",
        "every extra is noted as its step's best",
    ),
    (
        "cape.py",
        'least_worth = config.least_worth if config.expansion == "confidence" else 0.0',
        "least_worth = config.least_worth",
        "the paper's S(p), and fixed sizes, lose every extra of worth 0.03 or less",
    ),
    (
        "cape.py",
        "room = max(0, max_tokens - gamma)",
        "room = max_tokens",
        "max_tokens does not count the trajectory",
    ),
    (
        "cape.py",
        "confidences = torch.stack([q_draft.max() for _, q_draft, _ in steps]).tolist()",
        "confidences = torch.cat([q_draft[token] for token, q_draft, _ in steps]).tolist()",
        "sampling: p_i is the drawn token's probability, not the largest (deviation 3)",
    ),
    (
        "cape.py",
        "return sizes[bisect.bisect_left(bounds, confidence)]",
        "return sizes[min(bisect.bisect_left(bounds, confidence), len(bounds) - 1)]",
        "set_size: above the last bound the size of the range below",
    ),
    (
        "cape.py",
        "base_drafter, target, input_ids, cache, memory, logits_processor, do_sample",
        "base_drafter, target, input_ids, cache, memory, None, do_sample",
        "the trajectory is drafted without the logits processors",
    ),
    (
        "cape.py",
        '"fixed": config.width,',
        '"fixed": config.max_tokens,',
        "expansion fixed: width is ignored",
    ),
    (
        "cape.py",
        "reached *= float(q_draft[token])",
        "reached *= float(q_draft.max())",
        "worthwhile, sampling: the chance to get on is the likeliest token's, not the drawn one's",
    ),
    (
        "cape.py",
        '"draft" if memory.cache.fed is not None else "prefill"',
        '"draft"',
        "CAPE: its drafter's reading of the prompt counts as drafting, not as prefill",
    ),
    (
        "cape.py",
        "reached *= chance[step]",
        "reached = chance[step]",
        "expand: the worth of an extra forgets all steps but the last before it",
    ),
]
