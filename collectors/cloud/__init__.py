"""What a cloud says beforehand of a machine that it will stop, move or take away: notices, and the metadata services that have them."""
