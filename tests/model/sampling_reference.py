"""What can be drawn and how likely it is: float64, token by token, by sorting."""

import math


def probabilities(logits, temperature=1.0):
    exps = [math.exp((x - max(logits)) / temperature) for x in logits]
    return [e / sum(exps) for e in exps]


def kept(logits, how):
    """The tokens that top_k, then top_p, then min_p leave, those of equal logits by their ids."""
    likely = probabilities(logits, how.temperature)
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: how.top_k]
    total = sum(likely[token] for token in ranked)
    left, mass = [], 0.0
    for token in ranked:
        if mass < how.top_p * total or how.top_p >= 1:
            left.append(token)
        mass += likely[token]
    return [token for token in left if likely[token] >= how.min_p * max(likely)]


def penalised(logits, how, prompt, output):
    """The logits after the penalties and the bias."""
    changed = []
    for token, value in enumerate(logits):
        factor = how.repetition_penalty if token in prompt or token in output else 1.0
        count = output.count(token)
        taken = how.frequency_penalty * count + how.presence_penalty * (count > 0)
        repeated = value / factor if value > 0 else value * factor
        changed.append(repeated - taken + dict(how.logit_bias).get(token, 0.0))
    return changed


def split_mix(seed, index):
    """Output `index` of java.util.SplittableRandom's generator (public domain, Vigna)."""
    mask = 2**64 - 1
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def chi_square(counts, expected):
    """How many standard deviations lie between counts and what was expected (Wilson-Hilferty)."""
    pairs = [(n, e) for n, e in zip(counts, expected, strict=True) if e > 0]
    assert not any(n for n, e in zip(counts, expected, strict=True) if e == 0)
    freedom = len(pairs) - 1
    value = sum((n - e) ** 2 / e for n, e in pairs)
    spread = 2 / (9 * freedom)
    return ((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
