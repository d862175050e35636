package httpv2

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"unicode/utf8"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/host/endpoint"
	"github.com/nereid-serve/nereid/host/infer"
	"github.com/nereid-serve/nereid/tensor"
)

// head is the JSON part of an inference request. Source: KServe v2, "Inference Request JSON
// Object", and Triton's binary tensor data extension.
type head struct {
	ID         string                     `json:"id"`
	Parameters map[string]json.RawMessage `json:"parameters"`
	Inputs     *[]json.RawMessage         `json:"inputs"`
	Outputs    []headOutput               `json:"outputs"`
}

type headInput struct {
	Name       *string                    `json:"name"`
	DataType   *string                    `json:"datatype"`
	Shape      *tensor.Shape              `json:"shape"`
	Parameters map[string]json.RawMessage `json:"parameters"`
	Data       json.RawMessage            `json:"data"`
}

type headOutput struct {
	Name       *string                    `json:"name"`
	Parameters map[string]json.RawMessage `json:"parameters"`
}

// parsed is a request with where its data is.
type parsed struct {
	request      infer.Request
	data         [][]byte // by input: the raw form of JSON data; nil for binary and region inputs
	binary       []bool   // by input: its bytes follow the JSON part
	binaryBytes  uint64
	binaryOutput bool            // wanted of every output
	outputs      map[string]bool // by name: wanted as binary
}

// malformed is the answer to JSON that is none, or of the wrong form: Triton's 500.
func malformed(format string, args ...any) error {
	return errcode.Errorf(errcode.Internal, "failed to parse the request JSON buffer: "+format, args...)
}

func missing(member string) error {
	return malformed("attempt to access non-existing object member '%s'", member)
}

func parseHead(text []byte, p *parsed) error {
	decoder := json.NewDecoder(bytes.NewReader(text))
	var h head
	if err := decoder.Decode(&h); err != nil {
		return malformed("%v", err)
	}
	if h.Inputs == nil {
		return missing("inputs")
	}
	if rest := bytes.TrimLeft(text[decoder.InputOffset():], " \t\r\n"); len(rest) > 0 {
		return errcode.Errorf(errcode.InvalidArg, "unexpected %d bytes after the request JSON; binary tensor data needs the header %s", len(rest), headerLength)
	}
	r := &p.request
	r.ID = h.ID
	params := endpoint.NewParams(r)
	for key, raw := range h.Parameters {
		value, err := parameter(raw)
		if err != nil {
			return malformed("parameter '%s': %v", key, err)
		}
		if key == "binary_data_output" {
			on, ok := value.(bool)
			if !ok {
				return malformed("parameter '%s' must be a boolean", key)
			}
			p.binaryOutput = on
		}
		if err := params.Add(key, value); err != nil {
			return err
		}
	}
	params.Done()
	// Which input has no data at all is told before anything else is looked at, as in Triton.
	inputs := make([]headInput, len(*h.Inputs))
	for i, raw := range *h.Inputs {
		err := json.Unmarshal(raw, &inputs[i])
		if !hasData(&inputs[i]) {
			return errcode.Errorf(errcode.InvalidArg, "input %d must have 'data', or a parameter 'binary_data_size' or 'shared_memory_region': no field is set", i)
		}
		if err != nil {
			return malformed("inputs[%d]: %v", i, err)
		}
	}
	for i := range inputs {
		if err := p.input(&inputs[i]); err != nil {
			return err
		}
	}
	for i := range h.Outputs {
		if err := p.output(&h.Outputs[i]); err != nil {
			return err
		}
	}
	return nil
}

func hasData(in *headInput) bool {
	_, binary := in.Parameters["binary_data_size"]
	_, region := in.Parameters["shared_memory_region"]
	return binary || region || in.Data != nil
}

// parameter reads a value as endpoint.Params wants it.
func parameter(raw json.RawMessage) (any, error) {
	decoder := json.NewDecoder(bytes.NewReader(raw))
	decoder.UseNumber()
	var v any
	if err := decoder.Decode(&v); err != nil {
		return nil, err
	}
	switch v := v.(type) {
	case bool, string:
		return v, nil
	case json.Number:
		if n, err := strconv.ParseInt(v.String(), 10, 64); err == nil {
			return n, nil
		}
		if n, err := strconv.ParseUint(v.String(), 10, 64); err == nil {
			return n, nil
		}
		return v.Float64()
	}
	return nil, fmt.Errorf("must be a boolean, number or string")
}

func (p *parsed) input(h *headInput) error {
	switch {
	case h.Name == nil:
		return missing("name")
	case h.DataType == nil:
		return missing("datatype")
	case h.Shape == nil:
		return missing("shape")
	}
	in := infer.Input{Name: *h.Name, DataType: tensor.ParseDataType(*h.DataType), Shape: *h.Shape}
	if in.DataType == tensor.Invalid {
		return errcode.Errorf(errcode.InvalidArg, "inference input '%s' has unknown datatype '%s'", in.Name, *h.DataType)
	}
	ref, err := regionRef(h.Parameters)
	if err != nil {
		return err
	}
	var data []byte
	binary := false
	if raw, ok := h.Parameters["binary_data_size"]; ok {
		if in.ByteSize, err = unsigned("binary_data_size", raw); err != nil {
			return err
		}
		if p.binaryBytes += in.ByteSize; p.binaryBytes < in.ByteSize {
			return errcode.Errorf(errcode.InvalidArg, "binary_data_size of input '%s' is too large", in.Name)
		}
		binary = true
	} else if ref == nil {
		if data, err = encode(in.Name, in.DataType, h.Data); err != nil {
			return err
		}
		in.ByteSize = uint64(len(data))
	}
	if ref != nil {
		in.ByteSize, binary = 0, false
	}
	in.Region = ref
	p.request.Inputs = append(p.request.Inputs, in)
	p.data, p.binary = append(p.data, data), append(p.binary, binary)
	return nil
}

func (p *parsed) output(h *headOutput) error {
	if h.Name == nil {
		return missing("name")
	}
	out := infer.Output{Name: *h.Name}
	var err error
	if out.Region, err = regionRef(h.Parameters); err != nil {
		return err
	}
	if raw, ok := h.Parameters["classification"]; ok && string(raw) != "0" {
		return errcode.Errorf(errcode.Unsupported, "output '%s': the classification extension is not supported yet", out.Name)
	}
	if raw, ok := h.Parameters["binary_data"]; ok {
		on, err := strconv.ParseBool(string(raw))
		if err != nil {
			return malformed("parameter 'binary_data' of output '%s' must be a boolean", out.Name)
		}
		if p.outputs == nil {
			p.outputs = map[string]bool{}
		}
		p.outputs[out.Name] = on
	}
	p.request.Outputs = append(p.request.Outputs, out)
	return nil
}

func unsigned(key string, raw json.RawMessage) (uint64, error) {
	n, err := strconv.ParseUint(string(raw), 10, 64)
	if err != nil {
		return 0, errcode.Errorf(errcode.InvalidArg, "parameter '%s' must be a non-negative integer, got %.40s", key, raw)
	}
	return n, nil
}

func regionRef(params map[string]json.RawMessage) (*infer.RegionRef, error) {
	raw, ok := params["shared_memory_region"]
	if !ok {
		return nil, nil
	}
	ref := &infer.RegionRef{}
	if err := json.Unmarshal(raw, &ref.Name); err != nil {
		return nil, malformed("parameter 'shared_memory_region' must be a string")
	}
	var err error
	if raw, ok := params["shared_memory_offset"]; ok {
		if ref.Offset, err = unsigned("shared_memory_offset", raw); err != nil {
			return nil, err
		}
	}
	raw, ok = params["shared_memory_byte_size"]
	if !ok {
		return nil, errcode.Errorf(errcode.InvalidArg, "'shared_memory_region' '%s' needs 'shared_memory_byte_size'", ref.Name)
	}
	ref.ByteSize, err = unsigned("shared_memory_byte_size", raw)
	return ref, err
}

// encode turns JSON data, nested or flat, into a tensor's raw form. The text has been parsed
// once, so it is well-formed JSON.
func encode(name string, d tensor.DataType, text []byte) ([]byte, error) {
	if d == tensor.FP16 || d == tensor.BF16 {
		return nil, errcode.Errorf(errcode.InvalidArg, "receiving %s data via JSON is not supported. Please use the binary data format for input '%s'", d, name)
	}
	if len(text) == 0 || text[0] != '[' {
		return nil, malformed("data of input '%s' must be an array", name)
	}
	out := make([]byte, 0, len(text))
	size := int(d.ElementByteSize())
	for i := 0; i < len(text); {
		switch c := text[i]; c {
		case '[', ']', ',', ' ', '\t', '\n', '\r':
			i++
			continue
		case '{':
			return nil, malformed("data of input '%s' has an object in it", name)
		}
		end := i + 1
		if text[i] == '"' {
			for text[end] != '"' {
				if text[end] == '\\' {
					end++
				}
				end++
			}
			end++
		} else {
			for end < len(text) && text[end] != ',' && text[end] != ']' && text[end] > ' ' {
				end++
			}
		}
		element := text[i:end]
		i = end
		if d == tensor.Bytes {
			var s string
			if element[0] != '"' || json.Unmarshal(element, &s) != nil {
				return nil, malformed("data of input '%s' of datatype BYTES has an element %.40s that is no string", name, element)
			}
			out = tensor.AppendBytes(out, []byte(s))
			continue
		}
		v, err := number(d, string(element))
		if err != nil {
			return nil, errcode.Errorf(errcode.Of(err), "input '%s' of datatype %s: %w", name, d, err)
		}
		out = binary.LittleEndian.AppendUint64(out, v)
		out = out[:len(out)-8+size]
	}
	return out, nil
}

// number is the raw form of one element.
func number(d tensor.DataType, s string) (uint64, error) {
	wrong := func(err error) error {
		if e, ok := err.(*strconv.NumError); ok && e.Err == strconv.ErrRange {
			return errcode.Errorf(errcode.InvalidArg, "value %.40s is out of range", s)
		}
		return malformed("element %.40s has the wrong type", s)
	}
	bits := int(d.ElementByteSize()) * 8
	switch d {
	case tensor.Bool:
		switch s {
		case "true", "1":
			return 1, nil
		case "false", "0":
			return 0, nil
		}
		return 0, wrong(nil)
	case tensor.Int8, tensor.Int16, tensor.Int32, tensor.Int64:
		n, err := strconv.ParseInt(s, 10, bits)
		if err != nil {
			return 0, wrong(err)
		}
		return uint64(n), nil
	case tensor.Uint8, tensor.Uint16, tensor.Uint32, tensor.Uint64:
		n, err := strconv.ParseUint(s, 10, bits)
		if err != nil {
			return 0, wrong(err)
		}
		return n, nil
	case tensor.FP32, tensor.FP64:
		n, err := strconv.ParseFloat(s, bits)
		if err != nil {
			return 0, wrong(err)
		}
		if d == tensor.FP32 {
			return uint64(math.Float32bits(float32(n))), nil
		}
		return math.Float64bits(n), nil
	}
	return 0, wrong(nil)
}

// appendData appends a tensor's elements as a flat JSON array. The tensor's memory is the
// stub's, which may change it meanwhile: the caller gives a copy for BYTES.
func appendData(dst []byte, name string, d tensor.DataType, data []byte, elements int64) ([]byte, error) {
	dst = append(dst, '[')
	if d == tensor.Bytes {
		if err := tensor.CheckBytes(data, elements); err != nil {
			return nil, errcode.Errorf(errcode.Internal, "output '%s': %w", name, err)
		}
		items, _ := tensor.SplitBytes(data, elements) // checked
		for i, item := range items {
			if i > 0 {
				dst = append(dst, ',')
			}
			if !utf8.Valid(item) {
				return nil, errcode.Errorf(errcode.InvalidArg, "output '%s' is no UTF-8 text; ask for it as binary data", name)
			}
			dst = endpoint.AppendText(dst, string(item))
		}
		return append(dst, ']'), nil
	}
	size := int(d.ElementByteSize())
	for i := 0; i+size <= len(data); i += size {
		if i > 0 {
			dst = append(dst, ',')
		}
		b := data[i:]
		switch d {
		case tensor.Bool:
			dst = strconv.AppendBool(dst, b[0] != 0)
		case tensor.Int8:
			dst = strconv.AppendInt(dst, int64(int8(b[0])), 10)
		case tensor.Int16:
			dst = strconv.AppendInt(dst, int64(int16(binary.LittleEndian.Uint16(b))), 10)
		case tensor.Int32:
			dst = strconv.AppendInt(dst, int64(int32(binary.LittleEndian.Uint32(b))), 10)
		case tensor.Int64:
			dst = strconv.AppendInt(dst, int64(binary.LittleEndian.Uint64(b)), 10)
		case tensor.Uint8:
			dst = strconv.AppendUint(dst, uint64(b[0]), 10)
		case tensor.Uint16:
			dst = strconv.AppendUint(dst, uint64(binary.LittleEndian.Uint16(b)), 10)
		case tensor.Uint32:
			dst = strconv.AppendUint(dst, uint64(binary.LittleEndian.Uint32(b)), 10)
		case tensor.Uint64:
			dst = strconv.AppendUint(dst, binary.LittleEndian.Uint64(b), 10)
		case tensor.FP32:
			// As Triton: the nearest double, so that a client's float32 of it is the same.
			dst = endpoint.AppendFloat(dst, float64(math.Float32frombits(binary.LittleEndian.Uint32(b))), 64)
		case tensor.FP64:
			dst = endpoint.AppendFloat(dst, math.Float64frombits(binary.LittleEndian.Uint64(b)), 64)
		default:
			return nil, errcode.Errorf(errcode.InvalidArg, "sending %s data via JSON is not supported. Please use the binary data format for output '%s'", d, name)
		}
	}
	return append(dst, ']'), nil
}
