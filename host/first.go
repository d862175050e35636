package host

import (
	"fmt"
	"strings"

	"github.com/nereid-serve/nereid/tensor"
)

// FirstRequest is a command line that sends the model a request which it takes, with zeros
// for inputs; for who tries the server for the first time.
func (h *Host) FirstRequest(name, url string) string {
	v, err := h.models.Find(name, "")
	if err != nil {
		return ""
	}
	var inputs []string
	for _, in := range v.Config.Input {
		datatype := tensor.DataType(in.DataType)
		shape := tensor.Shape{}
		if v.Config.MaxBatchSize > 0 {
			shape = append(shape, 1)
		}
		for _, d := range in.Dims {
			if d == -1 {
				d = 2
			}
			shape = append(shape, d)
		}
		elements, ok := shape.Elements()
		if !ok || elements > 64 || datatype == tensor.FP16 || datatype == tensor.BF16 {
			return "curl -s " + url + "/v2/models/" + name
		}
		zero := "0"
		switch datatype {
		case tensor.Bytes:
			zero = `"text"`
		case tensor.Bool:
			zero = "false"
		}
		data := strings.TrimSuffix(strings.Repeat(zero+",", int(elements)), ",")
		inputs = append(inputs, fmt.Sprintf(`{"name":"%s","datatype":"%s","shape":%s,"data":[%s]}`, in.Name, datatype, shape, data))
	}
	return fmt.Sprintf("curl -s %s/v2/models/%s/infer -d '{\"inputs\":[%s]}'", url, name, strings.Join(inputs, ","))
}
