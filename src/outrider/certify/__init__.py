"""Is the output distributed as the target alone would have it? Tests, controls and the certificate."""
