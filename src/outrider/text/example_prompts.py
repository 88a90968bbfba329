"""Fifteen one-sentence prompts, written for measurements."""

PROMPTS = (
    "Once upon a time there lived a miller who had three sons and one grey cat.",
    "The old woman put the kettle on the fire and told them what she had seen in the wood.",
    "At the edge of the village stood a house that nobody had entered for a hundred years.",
    "The king's youngest daughter could whistle so well that the birds came down to listen.",
    "In the middle of the night somebody knocked three times at the door.",
    "The fox looked at the basket, and then he looked at the little girl.",
    "Far away beyond the mountains, where the snow never melts, there was a castle of glass.",
    "My grandfather used to say that a good boat knows its own way home.",
    "When the spring came, the two brothers set out to seek their fortune.",
    "The giant was so tall that he had to lie down in order to look in at the window.",
    "There was once a soldier who came home from the war with nothing but a penny and a drum.",
    "The children ran through the garden, and the dog ran after them.",
    "Every morning the princess found a white feather on the sill.",
    "The tailor measured the moon with his eye and took out his longest thread.",
    "It was the coldest winter that anyone could remember, and the wood was nearly gone.",
)
