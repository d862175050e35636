package httpv2

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/nereid-serve/nereid/errcode"
	"github.com/nereid-serve/nereid/host/endpoint"
	"github.com/nereid-serve/nereid/host/infer"
	"github.com/nereid-serve/nereid/host/model"
	configpb "github.com/nereid-serve/nereid/proto/config"
	"github.com/nereid-serve/nereid/tensor"
)

const headerLength = "Inference-Header-Content-Length"

// maxHeadByteSize bounds the JSON part of a request: it is held in memory, parsed.
const maxHeadByteSize = 512 << 20

// body opens a request's body, uncompressed, and bounded.
func (e *Endpoint) body(w http.ResponseWriter, r *http.Request) (io.Reader, int64, error) {
	limited := http.MaxBytesReader(w, r.Body, e.server.MaxRequest)
	var unpacked io.Reader
	var err error
	switch encoding := r.Header.Get("Content-Encoding"); encoding {
	case "", "identity":
		return limited, r.ContentLength, nil
	case "gzip":
		unpacked, err = gzip.NewReader(limited)
	case "deflate":
		unpacked, err = zlib.NewReader(limited)
	default:
		return nil, 0, errcode.Errorf(errcode.InvalidArg, "unsupported Content-Encoding '%s': gzip and deflate are supported", encoding)
	}
	if err != nil {
		return nil, 0, errcode.Errorf(errcode.InvalidArg, "Content-Encoding '%s': %w", r.Header.Get("Content-Encoding"), err)
	}
	// What a small body unpacks to is bounded as if it had been sent like that.
	return http.MaxBytesReader(w, io.NopCloser(unpacked), e.server.MaxRequest), -1, nil
}

func readFault(err error) error {
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		return errcode.Errorf(errcode.InvalidArg, "request body is larger than %d bytes, the limit of --max-request-byte-size", tooLarge.Limit)
	}
	return errcode.Errorf(errcode.InvalidArg, "failed to read the request body: %w", err)
}

func (e *Endpoint) infer(w http.ResponseWriter, r *http.Request) error {
	body, contentLength, err := e.body(w, r)
	if err != nil {
		return err
	}
	p := &parsed{}
	p.request.Ctx = r.Context()
	name, version := r.PathValue("model"), r.PathValue("version")
	if _, err := e.server.Models.Find(name, version); err != nil {
		return pathFault(err)
	}
	if contentLength == 0 || r.Header.Get(headerLength) == "0" {
		config, err := e.server.ModelConfig(name, version)
		if err != nil {
			return pathFault(err)
		}
		if body, err = rawRequest(p, config, body); err != nil {
			return err
		}
	} else {
		text, err := readHead(r, body, contentLength)
		if err != nil {
			return err
		}
		if err := parseHead(text, p); err != nil {
			return err
		}
	}
	fill := func(at func(int) []byte) error {
		for i := range p.request.Inputs {
			switch {
			case p.binary[i]:
				in := &p.request.Inputs[i]
				if n, err := io.ReadFull(body, at(i)); err == io.EOF || err == io.ErrUnexpectedEOF {
					return errcode.Errorf(errcode.InvalidArg, "unexpected size for input '%s', expecting %d additional bytes for model '%s'", in.Name, in.ByteSize-uint64(n), name)
				} else if err != nil {
					return readFault(err)
				}
			case p.data[i] != nil:
				copy(at(i), p.data[i])
			}
		}
		var one [1]byte
		if n, err := io.ReadFull(body, one[:]); n > 0 {
			return errcode.Errorf(errcode.InvalidArg, "unexpected additional input data for model '%s'", name)
		} else if err != io.EOF {
			return readFault(err)
		}
		return nil
	}
	v, response, err := e.server.Infer(name, version, &p.request, fill)
	if err != nil {
		return pathFault(err)
	}
	defer response.Close()
	return e.answer(w, r, p, v, response)
}

// pathFault gives a version that is no number the answer of a path that is none.
func pathFault(err error) error {
	if errcode.Of(err) == errcode.InvalidArg && strings.HasPrefix(err.Error(), "failed to get model version") {
		return errcode.Errorf(errcode.NotFound, "%w", err)
	}
	return err
}

// rawRequest makes a request of a body that has no JSON part: it is the one input's bytes, and
// what the configuration leaves open of its shape follows from their number. A BYTES body is
// one element, without its length. Source: Triton's binary tensor data extension, raw binary request.
func rawRequest(p *parsed, config *configpb.ModelConfig, body io.Reader) (io.Reader, error) {
	if n := len(config.Input); n != 1 {
		return nil, errcode.Errorf(errcode.InvalidArg, "Raw request must only have 1 input to be deduced but got %d inputs in '%s' model configuration", n, config.Name)
	}
	input := config.Input[0]
	data, err := io.ReadAll(body)
	if err != nil {
		return nil, readFault(err)
	}
	in := infer.Input{Name: input.Name, DataType: tensor.DataType(input.DataType)}
	elements := int64(1)
	if in.DataType == tensor.Bytes {
		data = tensor.AppendBytes(nil, data)
	} else {
		elements = int64(len(data)) / in.DataType.ElementByteSize()
	}
	if config.MaxBatchSize > 0 {
		in.Shape = append(in.Shape, 1)
	}
	open := -1
	known := int64(1)
	for _, d := range input.Dims {
		if d != -1 {
			known *= d
		} else if open >= 0 {
			return nil, errcode.Errorf(errcode.InvalidArg, "The shape of Raw request input can not be deduced because there are more than one variable-sized dimension in '%s'", config.Name)
		} else {
			open = len(in.Shape)
		}
		in.Shape = append(in.Shape, d)
	}
	if open >= 0 && known > 0 {
		in.Shape[open] = elements / known
	}
	in.ByteSize = uint64(len(data))
	p.request.Inputs = []infer.Input{in}
	p.data, p.binary = [][]byte{data}, []bool{false}
	p.binaryOutput = true
	return bytes.NewReader(nil), nil
}

// readHead reads the JSON part.
func readHead(r *http.Request, body io.Reader, contentLength int64) ([]byte, error) {
	given := r.Header.Get(headerLength)
	if given == "" {
		text, err := io.ReadAll(io.LimitReader(body, maxHeadByteSize+1))
		if err != nil {
			return nil, readFault(err)
		}
		if len(text) > maxHeadByteSize {
			return nil, errcode.Errorf(errcode.InvalidArg, "the request's JSON is larger than %d bytes; send large tensors as binary data", maxHeadByteSize)
		}
		return text, nil
	}
	n, err := strconv.ParseInt(given, 10, 64)
	limit := int64(maxHeadByteSize)
	if contentLength >= 0 {
		limit = min(limit, contentLength)
	}
	outOfRange := errcode.Errorf(errcode.InvalidArg, "%s: header size should be in range (0, %d], got: %.40s", headerLength, limit, given)
	if err != nil || n <= 0 || n > limit {
		return nil, outOfRange
	}
	// Grows with what comes, not with what is announced.
	var text bytes.Buffer
	if read, err := io.CopyN(&text, body, n); err == io.EOF {
		return nil, errcode.Errorf(errcode.InvalidArg, "%s: header size should be in range (0, %d], got: %d", headerLength, read, n)
	} else if err != nil {
		return nil, readFault(err)
	}
	return text.Bytes(), nil
}

func (e *Endpoint) answer(w http.ResponseWriter, r *http.Request, p *parsed, v *model.Version, response *infer.Response) error {
	head := make([]byte, 0, 512)
	head = append(head, `{`...)
	if p.request.ID != "" {
		head = append(endpoint.AppendText(append(head, `"id":`...), p.request.ID), ',')
	}
	head = endpoint.AppendText(append(head, `"model_name":`...), v.Name)
	head = append(head, `,"model_version":"`...)
	head = append(strconv.AppendInt(head, v.Number, 10), `","outputs":[`...)
	var chunks [][]byte
	total := 0
	for i := range response.Outputs {
		o := &response.Outputs[i]
		if i > 0 {
			head = append(head, ',')
		}
		head = endpoint.AppendText(append(head, `{"name":`...), o.Name)
		head = endpoint.AppendText(append(head, `,"datatype":`...), o.DataType.String())
		head = append(append(head, `,"shape":[`...), strings.Trim(o.Shape.String(), "[]")...)
		head = append(head, ']')
		asked, chosen := p.outputs[o.Name]
		switch {
		case o.Region != nil:
			// The client finds the bytes in its region. A size here would make some look for them behind the JSON.
		case asked || !chosen && p.binaryOutput:
			head = append(head, `,"parameters":{"binary_data_size":`...)
			head = append(strconv.AppendInt(head, int64(len(o.Data)), 10), '}')
			chunks = append(chunks, o.Data)
			total += len(o.Data)
		default:
			data := o.Data
			if o.DataType == tensor.Bytes {
				data = bytes.Clone(data)
				v.Stats.CopiedOut.Add(uint64(len(data)))
			}
			elements, _ := o.Shape.Elements()
			var err error
			if head, err = appendData(append(head, `,"data":`...), o.Name, o.DataType, data, elements); err != nil {
				return err
			}
		}
		head = append(head, '}')
	}
	head = append(head, "]}"...)
	if chunks == nil {
		w.Header().Set("Content-Type", "application/json")
	} else {
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set(headerLength, strconv.Itoa(len(head)))
	}
	out := writer(w, r, len(head)+total)
	_, err := out.Write(head)
	for _, c := range chunks {
		if err == nil {
			_, err = out.Write(c)
		}
	}
	if closeErr := out.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return errClientGone
	}
	return nil
}

// errClientGone says that there is nobody to answer any more.
var errClientGone = errors.New("client went away")

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

// writer is where a body goes: compressed where the client accepts that.
func writer(w http.ResponseWriter, r *http.Request, byteSize int) io.WriteCloser {
	accept := r.Header.Get("Accept-Encoding")
	switch {
	case accepts(accept, "gzip"):
		w.Header().Set("Content-Encoding", "gzip")
		return gzip.NewWriter(w)
	case accepts(accept, "deflate"):
		w.Header().Set("Content-Encoding", "deflate")
		return zlib.NewWriter(w)
	}
	w.Header().Set("Content-Length", fmt.Sprint(byteSize))
	return nopCloser{w}
}

func accepts(header, encoding string) bool {
	for part := range strings.SplitSeq(header, ",") {
		name, quality, _ := strings.Cut(strings.TrimSpace(part), ";")
		if name == encoding {
			return !strings.HasSuffix(strings.ReplaceAll(quality, " ", ""), "q=0")
		}
	}
	return false
}
