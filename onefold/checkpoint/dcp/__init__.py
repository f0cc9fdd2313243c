"""Reading and writing of folders of torch.distributed.checkpoint (DCP)."""
