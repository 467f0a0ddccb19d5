"""The answers of chats: reasoning, calls of tools and content are told apart."""
