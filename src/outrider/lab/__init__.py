"""The draft lab: questions about a pair, answered by measurement before anyone deploys it."""
