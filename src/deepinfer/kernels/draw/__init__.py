"""Drawing tokens by the Gumbel-max rule on a card; `sampling/sampler.py` holds the definition."""
