package modelconfig_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/nereid-serve/nereid/host/modelconfig"
)

const simple = `name: "m" backend: "python" max_batch_size: 8
input [ { name: "A" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]
output [ { name: "B" data_type: TYPE_STRING dims: [ 1 ] } ]
`

func check(text string) (string, error) {
	c, err := modelconfig.Parse([]byte(text))
	if err == nil {
		err = modelconfig.Normalize(c, "m")
	}
	if err == nil {
		err = modelconfig.Validate(c)
	}
	if err != nil {
		return "", err
	}
	return string(modelconfig.JSON(c)), nil
}

func TestDefaults(t *testing.T) {
	text, err := check(simple)
	if err != nil {
		t.Fatal(err)
	}
	var c map[string]any
	if err := json.Unmarshal([]byte(text), &c); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	for _, want := range []string{
		`"version_policy":{"latest":{"num_versions":1}}`, `"name":"m_0"`, `"count":1`, `"kind":"KIND_CPU"`, `"default_model_filename":"model.py"`,
		`"dims":[-1,4]`, `"optional":false`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%s is missing in %s", want, text)
		}
	}
}

func TestBadConfigurations(t *testing.T) {
	for text, phrase := range map[string]string{
		simple + "oops: 1":                          "line 4",
		simple + `max_batch_size: "x"`:              "line 4",
		`name: "other" backend: "b"`:                "directory name",
		`name: "m"`:                                 "backend",
		`name: "m" backend: "../x"`:                 "plain name",
		`name: "m" backend: "b" max_batch_size: -1`: "non-negative",
		`name: "m" backend: "b" instance_group [ { count: 100000 } ]`:                                                             "instance_group[0].count",
		`name: "m" backend: "b" instance_group [ { kind: KIND_GPU } ]`:                                                            "KIND_GPU",
		`name: "m" backend: "b" input [ { data_type: TYPE_FP32 dims: [ 1 ] } ]`:                                                   "input[0]",
		`name: "m" backend: "b" input [ { name: "A" dims: [ 1 ] } ]`:                                                              "data_type",
		`name: "m" backend: "b" input [ { name: "A" data_type: TYPE_FP32 } ]`:                                                     "dims",
		`name: "m" backend: "b" input [ { name: "A" data_type: TYPE_FP32 dims: [ -2 ] } ]`:                                        "-2",
		`name: "m" backend: "b" output [ { name: "A" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 4 ] } } ]`:               "reshape",
		`name: "m" backend: "b" input [ { name: "A" data_type: TYPE_FP32 dims: [ -1, 2 ] reshape { shape: [ 2 ] } } ]`:            "reshape",
		`name: "m" backend: "b" input [ { name: "A" data_type: TYPE_FP32 dims: 1 }, { name: "A" data_type: TYPE_FP32 dims: 1 } ]`: "twice",
	} {
		_, err := check(text)
		if err == nil || !strings.Contains(err.Error(), phrase) {
			t.Errorf("%s: %v, want %q", text, err, phrase)
		}
	}
	for _, good := range []string{
		`name: "m" backend: "b" input [ { name: "A" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 2, 3 ] } } ]`,
		`name: "m" backend: "b" input [ { name: "A" data_type: TYPE_FP32 dims: [ 1 ] reshape { } } ]`,
		`name: "m" backend: "b" input [ { name: "A" data_type: TYPE_FP32 dims: [ -1, 6 ] reshape { shape: [ -1, 2, 3 ] } } ]`,
		`platform: "onnxruntime_onnx"`,
	} {
		if _, err := check(good); err != nil {
			t.Errorf("%s: %v", good, err)
		}
	}
}

func TestNames(t *testing.T) {
	for _, bad := range []string{"", ".", "..", "a/b", "a\\b", "a\x00", "a\n", strings.Repeat("a", 256)} {
		if _, err := modelconfig.ParseName(bad); err == nil {
			t.Errorf("%q passes", bad)
		}
	}
	for _, good := range []string{"a", "a b", "größe", "$(x)", strings.Repeat("a", 255)} {
		if _, err := modelconfig.ParseName(good); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
}

// FuzzConfig: any text is a configuration or an error, and what passes has a JSON form.
func FuzzConfig(f *testing.F) {
	f.Add(simple)
	f.Add(`name: "m" backend: "b" parameters { key: "k" value { string_value: "\xff" } }`)
	f.Add("{{{{")
	f.Fuzz(func(t *testing.T, text string) {
		out, err := check(text)
		if err == nil && !json.Valid([]byte(out)) {
			t.Fatalf("not JSON: %s", out)
		}
	})
}
