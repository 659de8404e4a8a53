import os
import torch
import torch.distributed as dist
from engine_jobs import logits
from transformers import AutoModelForCausalLM
from hf_mxfp4 import MXFP4RLConfig
def tp(base, mode):
    os.environ["ACCELERATE_TORCH_DEVICE"]="cpu"
    dist.init_process_group("gloo")
    c={"none":None,"qat":MXFP4RLConfig(),"packed":MXFP4RLConfig(mode="packed")}[mode]
    ref=AutoModelForCausalLM.from_pretrained(base, quantization_config=c)
    l=logits(ref)
    m=AutoModelForCausalLM.from_pretrained(base, quantization_config={"none":None,"qat":MXFP4RLConfig(),"packed":MXFP4RLConfig(mode="packed")}[mode], tp_plan="auto")
    print(mode,{n:(tuple(p.shape),type(p).__name__) for n,p in list(m.named_parameters())[:4]})
    k=logits(m)
    print(mode,"DIFF",(l-k).abs().max(), l.abs().max())
    m.train()
    m(input_ids=torch.arange(2,30)[None],labels=torch.arange(2,30)[None]).loss.backward()
    print("grad",m.model.layers[0].mlp.up_proj.weight.grad is not None)
