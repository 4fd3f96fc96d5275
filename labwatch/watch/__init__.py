"""What `lab watch` says of logs and recordings: what happened, where it began and what to look at next."""
