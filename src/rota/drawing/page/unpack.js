// The page's data: a JSON head, and columns of numbers in one deflated block.
//
// A column's bytes lie plane by plane (all lowest bytes, then all second ones, …), because that packs well.

const COLUMN_TYPES = { b: Int8Array, h: Int16Array, i: Int32Array, d: Float64Array };

/** The head, and a function that returns the head's next column. */
async function unpack() {
  const head = JSON.parse(document.getElementById("head").textContent);
  const bytes = await inflate(document.getElementById("data").textContent);
  let at = 0;
  let next = 0;
  const nextColumn = () => {
    const [code, length] = head.columns[next++];
    const type = COLUMN_TYPES[code];
    const size = type.BYTES_PER_ELEMENT;
    const joined = new Uint8Array(size * length);
    for (let plane = 0; plane < size; plane++) {
      for (let i = 0, to = plane; i < length; i++, to += size) joined[to] = bytes[at++];
    }
    return new type(joined.buffer);
  };
  return [head, nextColumn];
}

async function inflate(base64) {
  const text = atob(base64);
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Each entry added to all before it; as doubles, which hold whole numbers up to 2^53. */
function summed(deltas) {
  const sums = new Float64Array(deltas.length);
  for (let i = 0, sum = 0; i < deltas.length; i++) sums[i] = sum += deltas[i];
  return sums;
}
