"""Small models and data sets that ship with Shardwright: what the default configuration and the tests train."""
