package stages

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"unicode/utf8"

	"github.com/stagecoach-serving/stagecoach/functions/minilm/wordpiece"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// EnvVocabulary is the environment variable with the path of the vocabulary of [Tokenize]. Without
// it, the path is model/vocab.txt in the image.
const EnvVocabulary = "MINILM_VOCABULARY"

// Tokenize returns the hooks of the stage that turns each text into an item with its tokens. It
// needs no model.
func Tokenize() stage.Hooks {
	var answer func(c *stage.Call) (tensor.Activation, error)
	return stage.Hooks{
		Place: func(context.Context, *stage.Replica) error {
			tokenizer, err := vocabulary(cmp.Or(os.Getenv(EnvVocabulary), "model/vocab.txt"))
			if err != nil {
				return fmt.Errorf("%w (environment %s)", err, EnvVocabulary)
			}
			answer = tokenize(tokenizer)
			return nil
		},
		Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) { return answer(c) }),
	}
}

// vocabulary reads the vocabulary of a tokeniser.
func vocabulary(path string) (*wordpiece.Tokenizer, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("the tokeniser's vocabulary: %w", err)
	}
	return wordpiece.New(string(b))
}

func tokenize(tokenizer *wordpiece.Tokenizer) func(c *stage.Call) (tensor.Activation, error) {
	return func(c *stage.Call) (tensor.Activation, error) {
		items := c.Items()
		if err := countTexts(items); err != nil {
			return nil, err
		}
		out := make(tensor.Activation, len(items))
		for i, it := range items {
			text, err := textOf(it)
			if err != nil {
				return nil, stage.BadInput(fmt.Errorf("item %d: %w, want text", i, err))
			}
			out[i] = tokenised(tokenizer.IDs(text, MaxTokens))
		}
		return out, nil
	}
}

// countTexts refuses more than [MaxTexts] items.
func countTexts(items tensor.Activation) error {
	if len(items) > MaxTexts {
		return stage.BadInput(fmt.Errorf("%d texts, want at most %d per request", len(items), MaxTexts))
	}
	return nil
}

// textOf returns an item's text: a JSON string, or UTF-8 bytes of any content type.
func textOf(it tensor.Item) (string, error) {
	if it.Tensors != nil {
		return "", fmt.Errorf("%d tensors", len(it.Tensors))
	}
	if strings.Contains(it.ContentType, "json") {
		var s string
		if err := json.Unmarshal(it.Bytes, &s); err != nil {
			return "", fmt.Errorf("%.40q of type %q", it.Bytes, it.ContentType)
		}
		return s, nil
	}
	if !utf8.Valid(it.Bytes) {
		return "", fmt.Errorf("%d bytes of type %q that are not UTF-8", len(it.Bytes), it.ContentType)
	}
	return string(it.Bytes), nil
}
