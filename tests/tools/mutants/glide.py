"""Mutants, (file, text that occurs once, its replacement, what that breaks), and their tests."""

TESTS = ["test_glide.py"]
MUTANTS = [
    (
        "glide.py",
        "return (block[:, :, None] > block[:, None, :])[:, None]",
        "return (block[:, :, None] >= block[:, None, :])[:, None]",
        "block mask: sees its own block",
    ),
    (
        "glide.py",
        "+ phase[:, None]) // block_size",
        "+ 0 * phase[:, None]) // block_size",
        "block mask: no phase",
    ),
    ("glide.py", "out = out * sees", "pass", "rows without keys"),
    (
        "glide.py",
        "self_mask = (positions.mT >= rows)[None, None]",
        "self_mask = (positions.mT >= rows - 1)[None, None]",
        "drafting mask: sees ahead",
    ),
    (
        "glide.py",
        "cross_mask = (positions.mT > rows[",
        "cross_mask = (positions.mT >= rows[",
        "drafting mask: reads its own row",
    ),
    (
        "glide.py",
        "where[:, :-1] = batch.loss_mask[:, 1:]",
        "where[:] = batch.loss_mask",
        "loss: rows off by one",
    ),
    (
        "glide.py",
        "following = batch.input_ids[:, 1:][where[:, :-1]]",
        "following = batch.input_ids[:, :-1][where[:, :-1]]",
        "loss, hard: learns its input",
    ),
    (
        "glide.py",
        "F.cross_entropy(logits, teacher.softmax(-1), reduction=",
        "F.cross_entropy(logits, teacher.mul(2).softmax(-1), reduction=",
        "loss, distilled: sharper labels",
    ),
    (
        "glide.py",
        "teacher = common.target_logits(target, batch.hidden[where], drafter.draft_ids)",
        "teacher = common.target_logits(target, batch.hidden[where.roll(1, 1)], drafter.draft_ids)",
        "loss, distilled: labels of the token after",
    ),
    (
        "glide.py",
        "return torch.minimum(p_target, q_draft).sum(), len(q_draft)",
        "return torch.maximum(p_target, q_draft).sum(), len(q_draft)",
        "alpha",
    ),
    (
        "glide.py",
        "return tables[top], [tables[layer] for layer in self.kv_layers]",
        "return tables[top], [tables[top] for _ in self.kv_layers]",
        "queries rotated as the top layer's keys",
    ),
    (
        "glide.py",
        "return tables[top], [",
        "return tables[min(layers)], [",
        "self-attention rotated as the layer that is read",
    ),
    (
        "glide.py",
        "queries = rope(queries, glimpse.rotary)",
        "pass",
        "cross-attention: queries are not rotated",
    ),
    (
        "glide.py",
        'copy_weights(ours.cross_layernorm, {"weight": theirs.input_layernorm.weight})',
        "pass",
        "build: the glimpse's norm starts at 1",
    ),
    (
        "glide.py",
        "theirs = layers[read]",
        "theirs = layers[-1]",
        "build: queries of another layer than is read",
    ),
    (
        "glide.py",
        "return list(range(top - self.config.num_layers, top))",
        "return [top - 1] * self.config.num_layers",
        "every drafter layer reads the top one",
    ),
    (
        "glide.py",
        "generation_config.max_length - input_ids.shape[1] - 1",
        "generation_config.max_length - input_ids.shape[1]",
        "no room left for the bonus token",
    ),
    (
        "glide.py",
        "            draft = lookup.merge(draft, input_ids, room)\n",
        "",
        "copies are left out",
    ),
    (
        "glide.py",
        "token = torch.multinomial(q_draft, 1)  # (1,)",
        "token = q_draft.argmax(keepdim=True)",
        "sampling: the likeliest token instead of a draw",
    ),
    (
        "glide.py",
        'if not scores.max() > float("-inf"):',
        "if False:",
        "drafts where nothing may be drafted",
    ),
    (
        "glide.py",
        'if not scores.max() > float("-inf"):',
        'if scores.max() == float("-inf"):',
        "drafts from NaN where nothing may be drafted",
    ),
    (
        "glide.py",
        "if not 1 <= config.num_layers <= depth:",
        "if not 1 <= config.num_layers:",
        "build: more layers than the target has",
    ),
    (
        "glide.py",
        "common.target_logits(target, batch.hidden[where]).softmax(-1)[:, drafter.draft_ids]",
        "common.target_logits(target, batch.hidden[where], drafter.draft_ids).softmax(-1)",
        "alpha over the draft vocabulary only",
    ),
    (
        "glide.py",
        "        ids = torch.cat([ids, fed], dim=1)\n",
        "",
        "while drafting, logits processors never see the tokens drafted so far",
    ),
]
