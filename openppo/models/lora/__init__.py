"""LoRA: adapters to train, the reference without them, and PEFT folders. Nothing here loads peft before it is used."""
