"""Conversations with a model that keeps states: short versions of `conversations.py`."""

from tests.model.conversations import Agents, ChatML, growing


def test_turns_of_agents_give_the_tokens_of_passes_without_a_cache():
    agents = Agents(0)
    agents.run(60)
    stats = agents.engine.stats
    assert min(stats.num_preemptions, stats.num_forks, stats.num_accepted_tokens) > 0
    assert stats.num_hit_tokens > stats.num_prompt_tokens / 5
    assert agents.num_differing() == 0
    agents.turns[7][1][0] += 1
    assert agents.num_differing() > 0


def test_each_turn_finds_at_least_95_percent_of_what_the_turn_before_computed():
    shares = [share for _, _, share in growing(ChatML(), turns=4)]
    assert min(shares[1:]) >= 0.95
