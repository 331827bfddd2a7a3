"""The trial server: OpenAI's protocol over the batched engine, so that a draft can be tried from any client."""
