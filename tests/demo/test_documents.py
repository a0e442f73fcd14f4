import pytest

from jenga.demo import documents
from jenga.demo.documents import Answer


def test_answers_count_what_was_not_found_as_computed():
    answer = Answer(document=0, question=1, prompt_tokens=1620, found_tokens=1024, text=" 5")

    assert answer.computed_tokens == 596


def test_turns_ask_every_document_before_any_is_asked_again():
    assert documents.turns() == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_prompts_share_a_document_and_no_more_of_it_than_asked_for():
    encoded = documents.prompts(
        lambda text: [2, *text.encode()], lambda text: list(text.encode())[40:95], 500
    )

    assert len(encoded) == 6
    assert encoded[0][:500] == encoded[2][:500] == encoded[4][:500]
    assert encoded[0][:40] != encoded[1][:40]
    assert len({tuple(prompt[500:]) for prompt in encoded}) == 3


def test_prompts_refuse_a_tokenizer_that_makes_too_few_or_too_many_tokens():
    with pytest.raises(ValueError, match="documents must have 500 tokens, got 3"):
        documents.prompts(lambda _: [1, 2, 3], lambda _: [1], 500)
    with pytest.raises(ValueError, match="questions must have at most 60 tokens, got 61"):
        documents.prompts(lambda _: [1] * 600, lambda _: [1] * 61, 500)


def test_documents_fit_into_what_the_model_reads():
    assert documents.document_tokens_of(32768) == documents.DOCUMENT_TOKENS
    assert documents.document_tokens_of(1024) == 960
    with pytest.raises(ValueError, match="the model reads 300 tokens"):
        documents.document_tokens_of(300)
