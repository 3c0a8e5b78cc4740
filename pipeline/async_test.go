package pipeline

import (
	"reflect"
	"strings"
	"testing"
	"time"
)

func TestAsyncAnnotations(t *testing.T) {
	def := defaultAsync()
	for name, tc := range map[string]struct {
		annotations map[string]string
		want        Async
		wrong       string // part of the error
	}{
		"nothing said": {nil, def, ""},
		"all": {map[string]string{
			"com.openfaas.retry.attempts": "3", "com.openfaas.retry.codes": "503, 429,429", "com.openfaas.retry.min_wait": "5", "com.openfaas.retry.max_wait": "1m",
			"stagecoach.dev/async-concurrency": "2", "stagecoach.dev/async-queue-limit": "50",
		}, Async{Concurrency: 2, QueueLimit: 50, Retry: Retry{3, []int{429, 503}, 5 * time.Second, time.Minute}}, ""},
		"never again":            {map[string]string{"com.openfaas.retry.attempts": "0", "com.openfaas.retry.codes": ""}, Async{Concurrency: 64, QueueLimit: 10_000, Retry: Retry{1, []int{}, 10 * time.Second, 2 * time.Minute}}, ""},
		"at once":                {map[string]string{"com.openfaas.retry.min_wait": "0s"}, Async{Concurrency: 64, QueueLimit: 10_000, Retry: Retry{10, nil, 0, 2 * time.Minute}}, ""},
		"the longest is shorter": {map[string]string{"com.openfaas.retry.max_wait": "1s"}, Async{Concurrency: 64, QueueLimit: 10_000, Retry: Retry{10, nil, time.Second, time.Second}}, ""},
		"the first is longer":    {map[string]string{"com.openfaas.retry.min_wait": "1h"}, Async{Concurrency: 64, QueueLimit: 10_000, Retry: Retry{10, nil, time.Hour, time.Hour}}, ""},
		"somebody else's":        {map[string]string{"com.openfaas.retry.colour": "red"}, def, ""},
		"attempts":               {map[string]string{"com.openfaas.retry.attempts": "101"}, def, `annotations["com.openfaas.retry.attempts"]: got "101", want a number from 0 to 100`},
		"codes":                  {map[string]string{"com.openfaas.retry.codes": "429,200"}, def, `annotations["com.openfaas.retry.codes"]: got "429,200"`},
		"wait":                   {map[string]string{"com.openfaas.retry.min_wait": "-1s"}, def, `annotations["com.openfaas.retry.min_wait"]`},
		"order":                  {map[string]string{"com.openfaas.retry.min_wait": "2m", "com.openfaas.retry.max_wait": "60"}, Async{Concurrency: 64, QueueLimit: 10_000, Retry: Retry{10, nil, 2 * time.Minute, time.Minute}}, "at most com.openfaas.retry.max_wait, which is 1m0s"},
		"dropped ones again":     {map[string]string{"stagecoach.dev/retry-dropped": " true"}, Async{Concurrency: 64, QueueLimit: 10_000, Retry: def.Retry, RetryDropped: true}, ""},
		"dropped ones":           {map[string]string{"stagecoach.dev/retry-dropped": "yes"}, def, `annotations["stagecoach.dev/retry-dropped"]: got "yes", want true or false`},
		"concurrency":            {map[string]string{"stagecoach.dev/async-concurrency": "0"}, def, "a number from 1 to 1000"},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := Parse("f", "ns", nil, tc.annotations)
			if !reflect.DeepEqual(f.Async, tc.want) {
				t.Errorf("got %+v, want %+v", f.Async, tc.want)
			}
			if (err == nil) != (tc.wrong == "") || err != nil && !strings.Contains(err.Error(), tc.wrong) {
				t.Errorf("error %v, want %q", err, tc.wrong)
			}
		})
	}
}
