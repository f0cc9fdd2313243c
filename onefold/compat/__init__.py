"""The names DeepSpeed users and Hugging Face expect, as thin views of what the runtime knows."""
