package httpv2

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/tensor"
)

func TestEncode(t *testing.T) {
	for _, c := range []struct {
		d    tensor.DataType
		text string
		want []byte
		code errcode.Code
	}{
		{tensor.Int8, `[[1,-2],[ 3 ]]`, []byte{1, 0xfe, 3}, 0}, {tensor.Bool, `[true,false,1]`, []byte{1, 0, 1}, 0},
		{tensor.Uint16, `[65535]`, []byte{0xff, 0xff}, 0}, {tensor.Bytes, `["a\"\\","\u00fc"]`, []byte("\x03\x00\x00\x00a\"\\\x02\x00\x00\x00\xc3\xbc"), 0},
		{tensor.FP32, `[1.5, -0]`, []byte{0, 0, 0xc0, 0x3f, 0, 0, 0, 0x80}, 0}, {tensor.Int32, `[]`, nil, 0},
		{tensor.Int8, `[128]`, nil, errcode.InvalidArg}, {tensor.Uint8, `[-1]`, nil, errcode.Internal}, {tensor.Int32, `[1.5]`, nil, errcode.Internal},
		{tensor.Uint64, `[18446744073709551616]`, nil, errcode.InvalidArg}, {tensor.FP32, `["1"]`, nil, errcode.Internal},
		{tensor.FP32, `[{}]`, nil, errcode.Internal}, {tensor.Bytes, `[1]`, nil, errcode.Internal}, {tensor.Int8, `5`, nil, errcode.Internal},
		{tensor.FP16, `[1]`, nil, errcode.InvalidArg}, {tensor.BF16, `[1]`, nil, errcode.InvalidArg}, {tensor.Bool, `[2]`, nil, errcode.Internal},
	} {
		got, err := encode("A", c.d, []byte(c.text))
		if c.code == 0 && (err != nil || !bytes.Equal(got, c.want)) || c.code != 0 && (err == nil || errcode.Of(err) != c.code) {
			t.Errorf("%s %s: %x, %v", c.d, c.text, got, err)
		}
	}
}

func TestHeadLength(t *testing.T) {
	for given, ok := range map[string]bool{"5": true, "10": true, "11": false, "0": false, "-1": false, "x": false, "99999999999999999999": false, "5 ": false} {
		r := httptest.NewRequest("POST", "/", strings.NewReader("0123456789"))
		r.Header.Set(headerLength, given)
		_, err := readHead(r, r.Body, r.ContentLength)
		if (err == nil) != ok || err != nil && !strings.Contains(err.Error(), "header size should be in range") {
			t.Errorf("%q: %v", given, err)
		}
	}
	r := httptest.NewRequest("POST", "/", nil)
	r.Header.Set(headerLength, "20")
	if _, err := readHead(r, strings.NewReader("short"), -1); err == nil || !strings.Contains(err.Error(), "header size should be in range") {
		t.Errorf("a chunked body that ends in its head: %v", err)
	}
}

// FuzzHead: whatever a body is, it is a request or an error; JSON data that passes is written
// back as JSON.
func FuzzHead(f *testing.F) {
	for _, s := range []string{
		`{"inputs":[{"name":"A","datatype":"FP32","shape":[2],"data":[1,2]}]}`,
		`{"id":"x","parameters":{"binary_data_output":true,"p":1.5},"inputs":[{"name":"A","datatype":"BYTES","shape":[1],"data":["\u00e4"]}],"outputs":[{"name":"B","parameters":{"binary_data":false}}]}`,
		`{"inputs":[{"name":"A","datatype":"INT8","shape":[1],"parameters":{"binary_data_size":1}}]}` + "\x00",
		`{"inputs":[{"name":"A","datatype":"INT8","shape":[-1],"parameters":{"shared_memory_region":"r","shared_memory_byte_size":18446744073709551615}}]}`,
		`{"inputs":5}`, `[`, strings.Repeat("[", 100),
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		p := &parsed{}
		if err := parseHead(body, p); err != nil {
			var coded *errcode.Error
			if !errors.As(err, &coded) {
				t.Fatalf("error without a code: %v", err)
			}
			return
		}
		for i, in := range p.request.Inputs {
			if p.data[i] == nil {
				continue
			}
			elements := int64(len(p.data[i]))
			if in.DataType == tensor.Bytes {
				items, err := tensor.SplitBytes(p.data[i], 1<<40)
				if err != nil {
					t.Fatal(err)
				}
				elements = int64(len(items))
			}
			out, err := appendData(nil, in.Name, in.DataType, p.data[i], elements)
			if err == nil && in.DataType != tensor.FP32 && in.DataType != tensor.FP64 && !json.Valid(out) {
				t.Fatalf("not JSON: %s", out)
			}
		}
	})
}

// FuzzBinaryHeader: any header value and body give a head or an error that says why.
func FuzzBinaryHeader(f *testing.F) {
	f.Add("2", []byte("{}"))
	f.Add("-9223372036854775808", []byte("{}"))
	f.Fuzz(func(t *testing.T, header string, body []byte) {
		r := httptest.NewRequest("POST", "/", nil)
		r.Header.Set(headerLength, header)
		text, err := readHead(r, io.LimitReader(bytes.NewReader(body), int64(len(body))), int64(len(body)))
		if err == nil && len(text) > len(body) {
			t.Fatal("a head longer than its body")
		}
	})
}
