package protojson_test

import (
	"encoding/json"
	"testing"

	"github.com/nereid-serve/nereid/internal/protojson"
	configpb "github.com/nereid-serve/nereid/proto/config"
	inferencepb "github.com/nereid-serve/nereid/proto/inference"
)

func TestText(t *testing.T) {
	for in, want := range map[string]string{
		"": `""`, "plain <&>": `"plain <&>"`, `a"b\`: `"a\"b\\"`, "line\nbreak\x00": "\"line\\nbreak\\u0000\"", "größe": `"größe"`, "\xff": `"\ufffd"`,
	} {
		if got := string(protojson.AppendText(nil, in)); got != want {
			t.Errorf("%q: %s, want %s", in, got, want)
		}
		var back string
		if err := json.Unmarshal(protojson.AppendText(nil, in), &back); err != nil {
			t.Errorf("%q: %v", in, err)
		}
	}
}

func TestMessages(t *testing.T) {
	c := &configpb.ModelConfig{
		Name: "m", MaxBatchSize: 8, Input: []*configpb.ModelInput{{Name: "A", DataType: configpb.DataType_TYPE_FP32, Dims: []int64{-1, 1 << 60}}},
		Parameters: map[string]*configpb.ModelParameter{"b": {StringValue: "2"}, "a": {StringValue: "1"}},
	}
	got := string(protojson.Append(nil, c))
	var v map[string]any
	if err := json.Unmarshal([]byte(got), &v); err != nil {
		t.Fatalf("%v: %s", err, got)
	}
	in := v["input"].([]any)[0].(map[string]any)
	if in["data_type"] != "TYPE_FP32" || in["optional"] != false || in["dims"].([]any)[0] != -1.0 {
		t.Errorf("input %v", in)
	}
	if _, there := v["dynamic_batching"]; there {
		t.Error("a message that is not set is shown")
	}
	stats := string(protojson.Append(nil, &inferencepb.StatisticDuration{Ns: 1<<63 + 1}))
	if stats != `{"count":0,"ns":9223372036854775809}` {
		t.Errorf("64-bit integers are numbers, as in Triton: %s", stats)
	}
}
