"""Work over several ranks: so far the policy of expert balancing and of moving experts."""
