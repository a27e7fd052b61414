# Copyright 2026 The loopergy authors. Licensed under the Apache License, Version 2.0.
"""`pipeline("text-generation")` with every family: batches, chats with the thinking switch, streams, stop strings."""

import copy
import json
import re
from threading import Thread

import pytest
import torch
from transformers import AutoTokenizer, TextIteratorStreamer, TextStreamer, pipeline

import loopergy

# Family: class, config fields, and the argument that sets how often something is applied.
FAMILIES = {
    "ouro": (loopergy.OuroForCausalLM, {}, "num_loops"),
    "lt2": (loopergy.LT2ForCausalLM, {"layer_mixers": "gdn,full"}, "num_loops"),
    "lt2-recurrent": (loopergy.LT2ForCausalLM, {"layer_mixers": "gdn"}, "num_loops"),
    "cem_llama": (loopergy.CEMLlamaForCausalLM, {"num_steps": 2}, "num_steps"),
    "nrgpt": (loopergy.NRGPTForCausalLM, {"max_position_embeddings": 256}, "num_steps"),
    "gpt": (loopergy.GPTBaselineForCausalLM, {"max_position_embeddings": 256}, None),
}
TURNS = [{"role": "user", "content": "What does the import statement do?"}]
# ChatML as Ouro's Thinking models have it: asked to think, the answer starts inside a thought.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(topics_tokenizer):
    tokenizer = copy.deepcopy(topics_tokenizer)
    tokenizer.chat_template = THINKING
    return tokenizer


def build(name, tokenizer):
    """Build a tiny model of a family in float64, whose greedy text does not hang on the last bit."""
    torch.manual_seed(0)
    kind, fields, _ = FAMILIES[name]
    fields = {"vocab_size": len(tokenizer), "initializer_range": 0.2, "eos_token_id": None, **fields}
    return kind(kind.config_class.from_preset("tiny", **fields)).to(torch.float64).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def generate(request, tokenizer):
    """Make a greedy pipeline of each family in turn, with a tokenizer that pads on the wrong side."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "right"
    model = build(request.param, tokenizer)
    made = pipeline("text-generation", model=model, tokenizer=tokenizer, do_sample=False, max_new_tokens=8)
    made.knob = FAMILIES[request.param][2]
    return made


def text_of(model, tokenizer, inputs, **options):
    tokens = model.generate(**inputs, max_new_tokens=8, do_sample=False, **options)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_a_padded_batch_gives_the_text_of_each_prompt_alone(generate):
    prompts = ["The import statement", "If", "An object of this class is callable, and it returns a value when"]
    alone = [generate(prompt)[0]["generated_text"] for prompt in prompts]
    together = [rows[0]["generated_text"] for rows in generate(prompts, batch_size=3)]
    assert together == alone
    assert len({len(text) for text in alone}) == 3
    assert generate.tokenizer.padding_side == "left"


@pytest.mark.parametrize("thinking", [False, True])
def test_a_chat_goes_through_the_template_with_its_thinking_switch(generate, thinking):
    asked = {"enable_thinking": thinking}
    inputs = generate.tokenizer.apply_chat_template(
        TURNS, add_generation_prompt=True, return_dict=True, return_tensors="pt", **asked
    )
    prompt = generate.tokenizer.decode(inputs["input_ids"][0])
    assert prompt.endswith("<|im_start|>assistant\n" + "<think>\n" * thinking)
    answer = generate(TURNS, tokenizer_encode_kwargs=asked)[0]["generated_text"]
    assert answer[:-1] == TURNS
    assert answer[-1] == {"role": "assistant", "content": text_of(generate.model, generate.tokenizer, inputs)}


def test_chats_of_several_lengths_are_answered_in_one_batch(generate):
    chats = [TURNS, [*TURNS, {"role": "assistant", "content": "It imports."}, {"role": "user", "content": "How?"}]]
    alone = [generate(chat)[0]["generated_text"] for chat in chats]
    assert [rows[0]["generated_text"] for rows in generate(chats, batch_size=2)] == alone


def test_loops_and_steps_are_passed_through(generate):
    prompt = "The import statement"
    if generate.knob is None:
        with pytest.raises(ValueError, match="num_steps"):
            generate(prompt, num_steps=1)
        return
    inputs = generate.tokenizer(prompt, return_tensors="pt")
    once = generate(prompt, return_full_text=False, **{generate.knob: 1})[0]["generated_text"]
    assert once == text_of(generate.model, generate.tokenizer, inputs, **{generate.knob: 1})
    assert once != generate(prompt, return_full_text=False)[0]["generated_text"]


def test_streams_give_the_text_piece_by_piece(generate, capsys):
    model, tokenizer = generate.model, generate.tokenizer
    inputs = tokenizer("The import statement", return_tensors="pt")
    expected = text_of(model, tokenizer, inputs)
    text_of(model, tokenizer, inputs, streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True))
    assert capsys.readouterr().out == expected + "\n"

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=60)
    thread = Thread(target=generate, args=("The import statement",), kwargs={"streamer": streamer})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces) == expected
    assert len([piece for piece in pieces if piece]) > 1


def test_a_stop_string_ends_the_text(generate):
    whole = generate("The import statement", return_full_text=False)[0]["generated_text"]
    stop = re.search("[a-z]{2}", whole).group()
    cut = generate("The import statement", return_full_text=False, stop_sequence=stop)[0]["generated_text"]
    assert whole.startswith(cut)
    assert stop in cut
    assert len(cut) < len(whole)


def test_published_ouro_folders_stop_where_their_chat_format_ends(tokenizer, tmp_path):
    """Guards D1: the files say bos = eos = pad = 0."""
    build("ouro", tokenizer).to(torch.float32).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for file in ("config.json", "generation_config.json"):
        fields = json.loads((tmp_path / file).read_text())
        fields |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
        (tmp_path / file).write_text(json.dumps(fields))
    made = pipeline("text-generation", model=str(tmp_path), do_sample=False, max_new_tokens=64)
    assert made.model.generation_config.eos_token_id == 2
    with torch.no_grad():  # nothing but `<|im_end|>` after the first token
        made.model.lm_head.weight[2] = 100 * made.model.model.norm.weight.sign()
    always = {"sequence_bias": {(2,): 1000.0}}
    assert made([TURNS, TURNS[:1]], batch_size=2, **always)[0][0]["generated_text"][-1]["content"] == ""


def test_a_student_answers_in_its_teachers_chat_format(tokenizer, tmp_path):
    build("ouro", tokenizer).to(torch.float32).save_pretrained(tmp_path / "teacher")
    tokenizer.save_pretrained(tmp_path / "teacher")
    loopergy.convert(tmp_path / "teacher", keep_layers=[0]).save_pretrained(tmp_path / "student")
    student = AutoTokenizer.from_pretrained(loopergy.export(tmp_path / "student", tmp_path / "exported"))
    assert student.chat_template == THINKING
    shown = student.apply_chat_template(TURNS, add_generation_prompt=True, tokenize=False, enable_thinking=True)
    assert shown.endswith("<|im_start|>assistant\n<think>\n")
