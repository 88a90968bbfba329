"""Pre-train the target of the embedded pair: a small Llama, by Hugging Face's Trainer.

    python recipes/fable/pretrain.py CORPUS.txt FOLDER --tokenizer FOLDER [--steps N] [--layers 6] ...

A run that is killed goes on from its last checkpoint (in FOLDER/training) when it is started again with the same
options. Several GPUs: ``accelerate launch recipes/fable/pretrain.py ...``. The last sequences of the text are held out.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from outrider.distill.data import Mixture, text_tokens
from outrider.system.provenance import provenance

HELD_OUT, MOST_HELD_OUT = 0.05, 64  # of the sequences of the text


class Pieces(Dataset[dict[str, Tensor]]):
    """Training sequences as Trainer takes them, without end."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture

    def __len__(self) -> int:
        return 2**40

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.mixture[index]
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--intermediate-size", type=int, default=704)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4300)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="also where there is a GPU")
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    num_heads = arguments.hidden_size // arguments.head_size
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=arguments.context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(arguments.seed)
    model = LlamaForCausalLM(config)
    text, length = text_tokens(tokenizer, arguments.corpus), arguments.length
    num_held_out = min(max(1, round(HELD_OUT * (len(text) // length))), MOST_HELD_OUT)
    text, held_out = text.split([len(text) - num_held_out * length, num_held_out * length])
    data = Pieces(Mixture(text, torch.empty(0, length, dtype=torch.long), length, 0.0, arguments.seed))
    is_gpu = torch.cuda.is_available() and not arguments.cpu
    training = TrainingArguments(
        output_dir=str(arguments.folder / "training"),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        train_sampling_strategy="sequential",  # the mixture is random already, and the same after a kill
        learning_rate=arguments.learning_rate,
        adam_beta2=0.95,
        weight_decay=0.1,
        warmup_steps=max(1, arguments.steps // 50),
        lr_scheduler_type="warmup_stable_decay",
        lr_scheduler_kwargs={"num_decay_steps": round(0.6 * arguments.steps), "min_lr_ratio": 0.0},
        eval_strategy="steps",
        eval_steps=max(1, arguments.steps // 20),
        save_steps=max(1, arguments.steps // 20),
        save_total_limit=2,
        logging_steps=max(1, arguments.steps // 100),
        report_to="none",
        dataloader_pin_memory=is_gpu,
        bf16=is_gpu,
        use_cpu=arguments.cpu,
        seed=arguments.seed,
    )
    trainer = Trainer(
        model=model,
        args=training,
        train_dataset=data,
        eval_dataset=[{"input_ids": row, "labels": row} for row in held_out.view(-1, length)],
    )
    # The trainer writes its state last, so a checkpoint that has one is whole.
    whole = [path.parent for path in Path(training.output_dir).glob("checkpoint-*/trainer_state.json")]
    last = max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)
    trainer.train(resume_from_checkpoint=None if last is None else str(last))
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        model.to(torch.bfloat16).save_pretrained(arguments.folder)
        tokenizer.save_pretrained(arguments.folder)
        num_params = sum(parameter.numel() for parameter in model.parameters())
        result = {"validation_loss": loss, "perplexity": math.exp(loss), "num_params": num_params}
        print(json.dumps(result | {"provenance": provenance("cuda" if is_gpu else "cpu")}))


if __name__ == "__main__":
    main()
