"""HTTP as OpenAI's clients speak it, over one engine whose rows join and leave."""
