"""What a dataset's owner does to it: pack, inspect, pair."""
