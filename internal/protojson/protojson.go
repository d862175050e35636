// Package protojson writes protobuf messages as JSON the way Triton does: proto field names,
// 64-bit integers as numbers, enums by name, and fields without presence also when they have
// their default. protobuf's own JSON writes 64-bit integers as strings.
package protojson

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"math"
	"sort"
	"strconv"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Append appends the JSON of m to dst.
func Append(dst []byte, m proto.Message) []byte { return appendMessage(dst, m.ProtoReflect()) }

func appendMessage(dst []byte, m protoreflect.Message) []byte {
	dst = append(dst, '{')
	first := true
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.HasPresence() && !m.Has(f) {
			continue
		}
		if !first {
			dst = append(dst, ',')
		}
		first = false
		dst = append(AppendText(dst, string(f.Name())), ':')
		dst = appendField(dst, f, m.Get(f))
	}
	return append(dst, '}')
}

func appendField(dst []byte, f protoreflect.FieldDescriptor, v protoreflect.Value) []byte {
	switch {
	case f.IsMap():
		return appendMap(dst, f, v.Map())
	case f.IsList():
		dst = append(dst, '[')
		for i := range v.List().Len() {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = appendValue(dst, f, v.List().Get(i))
		}
		return append(dst, ']')
	}
	return appendValue(dst, f, v)
}

func appendMap(dst []byte, f protoreflect.FieldDescriptor, m protoreflect.Map) []byte {
	keys := make([]protoreflect.MapKey, 0, m.Len())
	m.Range(func(k protoreflect.MapKey, _ protoreflect.Value) bool { keys = append(keys, k); return true })
	sort.Slice(keys, func(i, j int) bool { return keys[i].String() < keys[j].String() })
	dst = append(dst, '{')
	for i, k := range keys {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(AppendText(dst, k.String()), ':')
		dst = appendValue(dst, f.MapValue(), m.Get(k))
	}
	return append(dst, '}')
}

func appendValue(dst []byte, f protoreflect.FieldDescriptor, v protoreflect.Value) []byte {
	switch f.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return appendMessage(dst, v.Message())
	case protoreflect.EnumKind:
		if e := f.Enum().Values().ByNumber(v.Enum()); e != nil {
			return AppendText(dst, string(e.Name()))
		}
		return strconv.AppendInt(dst, int64(v.Enum()), 10)
	case protoreflect.BoolKind:
		return strconv.AppendBool(dst, v.Bool())
	case protoreflect.StringKind:
		return AppendText(dst, v.String())
	case protoreflect.BytesKind:
		return AppendText(dst, base64.StdEncoding.EncodeToString(v.Bytes()))
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		if n := v.Float(); !math.IsNaN(n) && !math.IsInf(n, 0) {
			return strconv.AppendFloat(dst, n, 'g', -1, 64)
		}
		return append(dst, "null"...)
	case protoreflect.Uint32Kind, protoreflect.Uint64Kind, protoreflect.Fixed32Kind, protoreflect.Fixed64Kind:
		return strconv.AppendUint(dst, v.Uint(), 10)
	default:
		return strconv.AppendInt(dst, v.Int(), 10)
	}
}

// AppendText appends s as a JSON string. Bytes that are no UTF-8 are replaced.
func AppendText(dst []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c == '"' || c == '\\' || c >= 0x7f {
			var b bytes.Buffer
			encoder := json.NewEncoder(&b)
			encoder.SetEscapeHTML(false)
			_ = encoder.Encode(s) // a string always has a JSON form
			return append(dst, bytes.TrimSuffix(b.Bytes(), []byte{'\n'})...)
		}
	}
	return append(append(append(dst, '"'), s...), '"')
}
