//! A dataset as training sees it: numbered samples, any of which can be read at any time.

use crate::IGNORED;
use crate::check::{self, Subject};
use crate::error::{Error, Result};
use crate::files::{Integer, OpenFile};
use crate::images::{ImageSpec, Images};
use crate::inputs::Inputs;
use crate::masking::Masking;
use crate::order::Order;
use crate::pictures::{KEPT_BYTES_MAX, Pictures};
use crate::pieces::{Frame, Pieces};
use crate::prepare::{self, Prepared};
use crate::rows::Rows;
use crate::source::{Kind, Source, SourceFile};
use crate::stored;
use crate::stream::Stream;
use crate::tokenizer::Tokenizer;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

/// Ids are handed on as `i32`, so no vocabulary is larger.
const VOCABULARY_MAX: usize = 1 << 31;

/// What a dataset is opened with.
#[derive(Clone, Debug)]
pub struct DatasetSpec {
    /// The file or folder.
    pub source: PathBuf,
    /// What turns its text into tokens; files that hold tokens already need none.
    pub tokenizer: Arc<Tokenizer>,
    /// Tokens of one sample.
    pub sequence: usize,
    /// The model's vocabulary: every token id must be below it.
    pub vocabulary: usize,
    /// The folder that prepared tokens are kept in; it is made if it is not there.
    pub cache: PathBuf,
    /// The field of `.jsonl`, or the column of `.parquet`, that holds the text.
    pub text_field: String,
    /// The seed by which tokens are masked, for a model that learns to restore them; without one a label is
    /// the next token. Rows that have labels of their own are taken as they are.
    pub masked: Option<u64>,
    /// Whether each document is a sample of its own, padded to the sequence (or several, where it is longer);
    /// otherwise documents follow each other, and every sample is full. Only masked ones can be.
    pub documents: bool,
}

impl DatasetSpec {
    /// A spec with the usual text field, `text`, for a model that learns the next token.
    pub fn new(
        source: impl Into<PathBuf>,
        tokenizer: Arc<Tokenizer>,
        sequence: usize,
        vocabulary: usize,
        cache: impl Into<PathBuf>,
    ) -> Self {
        let (source, cache) = (source.into(), cache.into());
        let text_field = "text".into();
        Self { source, tokenizer, sequence, vocabulary, cache, text_field, masked: None, documents: false }
    }
}

/// Samples in memory: rows of `sequence`, end to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Samples {
    /// Tokens of one sample.
    pub sequence: usize,
    /// The tokens that go in.
    pub inputs: Vec<i32>,
    /// How many of each sample's tokens count: the others are padding.
    pub lengths: Vec<i32>,
    /// The token that should come out at each position, or [`crate::IGNORED`].
    pub labels: Vec<i32>,
}

/// An open dataset. It can be shared between threads.
#[derive(Debug)]
pub struct Dataset {
    samples: Kept,
    masking: Option<Masking>,
    sequence: usize,
    documents: Option<u64>,
    fingerprint: String,
}

/// A sample that is asked for, and where it goes.
struct Wanted<'a> {
    epoch: u64,
    index: u64,
    inputs: Inputs<'a>,
    labels: &'a mut [i32],
}

/// Where the samples are.
#[derive(Debug)]
enum Kept {
    /// Cut from a row of tokens.
    Windows(Stream),
    /// Documents, or pieces of them.
    Pieces(Pieces),
    /// Stored one by one.
    Rows(Rows),
    Images(Images),
}

impl Dataset {
    /// Opens the dataset: finds its files, tokenizes them if that has not been done before, and looks at
    /// every token id if that has not been done before. `progress` hears how many bytes of how many are done.
    ///
    /// # Panics
    /// If documents are to be samples and nothing is masked.
    pub fn open(spec: &DatasetSpec, progress: &mut dyn FnMut(u64, u64)) -> Result<Self> {
        if spec.sequence == 0 {
            return Err(Error::SequenceZero);
        }
        let vocabulary = spec.vocabulary.min(VOCABULARY_MAX);
        assert!(spec.masked.is_some() || !spec.documents, "documents are samples only where they are masked");
        let source = Source::find(&spec.source)?;
        match source.kind {
            Kind::Tokens | Kind::Safetensors if spec.documents => {
                Err(Error::NoDocuments { path: spec.source.clone() })
            }
            Kind::Text | Kind::JsonLines | Kind::Parquet => open_text(spec, &source, vocabulary, progress),
            Kind::Tokens => open_tokens(spec, &source, vocabulary, progress),
            Kind::Safetensors => open_rows(spec, &source, vocabulary, progress),
            Kind::Pictures => unreachable!("only a model of images looks for pictures"),
        }
    }

    /// Opens a dataset of images: finds its files, and looks at every image and label if that has not been done
    /// before.
    pub fn open_images(spec: &ImageSpec, progress: &mut dyn FnMut(u64, u64)) -> Result<Self> {
        let [channels, rows, columns] = spec.shape;
        let known = spec.class_names.as_deref();
        let (images, source) = match Pictures::find(&spec.source, known, spec.classes, rows)? {
            Some(_) if channels != 3 || rows != columns => {
                return Err(Error::NotRgb { path: spec.source.clone(), shape: spec.shape });
            }
            Some((pictures, source)) => (Images::of_pictures(spec, pictures), source),
            None => {
                let source = Source::find(&spec.source)?;
                if source.kind != Kind::Safetensors {
                    return Err(Error::NotImages { path: spec.source.clone() });
                }
                let mut images = Images::of_tensors(spec);
                for file in &source.files {
                    images.append(&file.path)?;
                }
                (images, source)
            }
        };
        let (subject, reading) = match images.pictures() {
            Some(pictures) => (Subject::Pictures(pictures), format!("pictures {rows}")),
            None => (Subject::Images(&images), format!("images {channels} {rows} {columns}")),
        };
        let checked = check::check(&source, &subject, &reading, spec.classes, &spec.cache, progress)?;
        let fingerprint = fingerprint(&reading, 0, &checked.content);
        let samples = Kept::Images(images);
        Ok(Self { samples, masking: None, sequence: 0, documents: None, fingerprint })
    }

    /// Samples in one epoch: at least one.
    #[expect(clippy::len_without_is_empty, reason = "an empty dataset does not open")]
    pub fn len(&self) -> u64 {
        match &self.samples {
            Kept::Windows(stream) => stream.windows(self.sequence),
            Kept::Pieces(pieces) => pieces.count,
            Kept::Rows(rows) => rows.rows,
            Kept::Images(images) => images.count,
        }
    }

    /// Tokens in the dataset; none where samples are images.
    pub fn tokens(&self) -> u64 {
        match &self.samples {
            Kept::Windows(stream) => stream.tokens,
            Kept::Pieces(pieces) => pieces.stream.tokens,
            Kept::Rows(rows) => rows.tokens,
            Kept::Images(_) => 0,
        }
    }

    /// Documents the text consisted of; unknown where the files hold tokens.
    pub fn documents(&self) -> Option<u64> {
        self.documents
    }

    /// Tokens of one sample; none where samples are images.
    pub fn sequence(&self) -> usize {
        self.sequence
    }

    /// The names of the classes, where samples are pictures in folders that have their names.
    pub fn class_names(&self) -> Option<&[String]> {
        Some(&self.pictures()?.classes)
    }

    /// Bytes of samples that are kept in memory as they are read, at the most.
    pub fn kept_bytes_max(&self) -> u64 {
        self.pictures().map_or(0, |_| KEPT_BYTES_MAX)
    }

    fn pictures(&self) -> Option<&Pictures> {
        match &self.samples {
            Kept::Images(images) => images.pictures(),
            _ => None,
        }
    }

    /// What identifies the samples: the same on every machine that has the same data, wherever it lies and
    /// whichever files it came from; another when a sample differs.
    pub fn fingerprint(&self) -> String {
        self.fingerprint.clone()
    }

    /// Reads sample `index` as it is in `epoch`: each masks other tokens, where any are masked, and varies images
    /// in another way.
    ///
    /// # Panics
    /// If there is no such sample, or the inputs are not of its kind or size.
    pub fn read(&self, epoch: u64, index: u64, inputs: Inputs, labels: &mut [i32]) -> Result<()> {
        assert!(index < self.len(), "sample {index} of {}", self.len());
        if let Kept::Images(images) = &self.samples {
            return images.read(epoch, index, inputs.images(), labels);
        }
        if let Kept::Pieces(pieces) = &self.samples {
            return self.read_piece(pieces, epoch, index, inputs, labels);
        }
        let inputs = inputs.tokens();
        assert_eq!((inputs.len(), labels.len()), (self.sequence, self.sequence));
        match (&self.samples, &self.masking) {
            (Kept::Windows(stream), None) => stream.read_window(index, inputs, labels),
            (Kept::Windows(stream), Some(masking)) => {
                let count = stream.read_inputs(index, inputs)?;
                labels.fill(IGNORED);
                masking.apply(epoch, index, &mut inputs[..count], &mut labels[..count]);
                Ok(())
            }
            (Kept::Rows(rows), masking) => {
                rows.read(index, inputs, labels)?;
                if let Some(masking) = masking.as_ref().filter(|_| !rows.has_labels(index)) {
                    masking.apply(epoch, index, inputs, labels);
                }
                Ok(())
            }
            (Kept::Images(_) | Kept::Pieces(_), _) => unreachable!("read above"),
        }
    }

    /// Masks are drawn among a document's own tokens: what stands around them is never a target.
    fn read_piece(
        &self,
        pieces: &Pieces,
        epoch: u64,
        index: u64,
        inputs: Inputs,
        labels: &mut [i32],
    ) -> Result<()> {
        let (inputs, lengths) = inputs.padded();
        assert_eq!((inputs.len(), labels.len(), lengths.len()), (self.sequence, self.sequence, 1));
        let (own, length) = pieces.read(index, inputs)?;
        lengths[0] = length as i32;
        labels.fill(IGNORED);
        if let Some(masking) = &self.masking {
            masking.apply(epoch, index, &mut inputs[own.clone()], &mut labels[own]);
        }
        Ok(())
    }

    /// Reads samples, each of (epoch, index), into rooms of equal size end to end. Pictures, whose decoding takes long,
    /// are shared out to all processors.
    ///
    /// # Panics
    /// As [`Dataset::read`].
    pub fn read_all(&self, samples: &[(u64, u64)], inputs: Inputs, labels: &mut [i32]) -> Result<()> {
        let each = (labels.len() / samples.len().max(1)).max(1);
        let rooms = inputs.of_each(samples.len()).into_iter().zip(labels.chunks_mut(each));
        let wanted = samples.iter().zip(rooms);
        let mut wanted: Vec<Wanted> = wanted
            .map(|((epoch, index), (inputs, labels))| Wanted { epoch: *epoch, index: *index, inputs, labels })
            .collect();
        let read = |part: Vec<Wanted>| -> Result<()> {
            part.into_iter()
                .try_for_each(|wanted| self.read(wanted.epoch, wanted.index, wanted.inputs, wanted.labels))
        };
        let processors = match self.pictures() {
            Some(_) => std::thread::available_parallelism().map_or(1, usize::from),
            None => 1,
        };
        let part = wanted.len().div_ceil(processors).max(1);
        if part >= wanted.len() {
            return read(wanted);
        }
        let mut parts = Vec::new();
        while !wanted.is_empty() {
            let rest = wanted.split_off(part.min(wanted.len()));
            parts.push(std::mem::replace(&mut wanted, rest));
        }
        std::thread::scope(|scope| {
            let threads: Vec<_> = parts.into_iter().map(|part| scope.spawn(|| read(part))).collect();
            // The first sample's error is told, whichever thread was first.
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// Reads the samples of tokens at `positions` of the endless stream.
    pub fn batch(&self, order: &Order, positions: Range<u64>) -> Result<Samples> {
        let (inputs, lengths, labels) = (Vec::new(), Vec::new(), Vec::new());
        let mut samples = Samples { sequence: self.sequence, inputs, lengths, labels };
        for position in positions {
            let (epoch, index) = order.index(position);
            let start = samples.inputs.len();
            samples.inputs.resize(start + self.sequence, 0);
            samples.labels.resize(start + self.sequence, 0);
            samples.lengths.push(0);
            let length = samples.lengths.last_mut().expect("just pushed");
            let inputs = Inputs::Padded(&mut samples.inputs[start..], std::slice::from_mut(length));
            self.read(epoch, index, inputs, &mut samples.labels[start..])?;
        }
        Ok(samples)
    }

    /// Windows of a stream, if it is long enough for one.
    fn of_stream(
        stream: Stream,
        spec: &DatasetSpec,
        masking: Option<Masking>,
        documents: Option<u64>,
        content: &str,
    ) -> Result<Self> {
        let needed = (spec.sequence as u64).saturating_add(1);
        if stream.tokens < needed {
            return Err(Error::TooShort { path: spec.source.clone(), tokens: stream.tokens, needed });
        }
        let fingerprint = fingerprint("windows", spec.sequence, content);
        Ok(Self { samples: Kept::Windows(stream), masking, sequence: spec.sequence, documents, fingerprint })
    }
}

fn open_text(
    spec: &DatasetSpec,
    source: &Source,
    vocabulary: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Dataset> {
    let tokenizer = &*spec.tokenizer;
    if tokenizer.vocabulary() > vocabulary {
        let (tokenizer, tokenizer_ids) = (tokenizer.name(), tokenizer.vocabulary());
        return Err(Error::VocabularyTooSmall { tokenizer, tokenizer_ids, vocabulary });
    }
    let masking = masking(spec, vocabulary, true)?;
    let (field, apart) = (&spec.text_field, spec.documents);
    let Prepared { tokens, header, ends } =
        prepare::prepare(source, tokenizer, field, apart, &spec.cache, progress)?;
    let mut stream = Stream::new(vocabulary);
    stream.append(tokens, header.integer, stored::HEADER_BYTES as u64, header.tokens);
    let content = blake3::Hash::from_bytes(header.content).to_hex();
    if let Some(ends) = ends {
        let (sequence, documents) = (spec.sequence, header.documents);
        let pieces = Pieces::new(stream, ends, documents, Frame::of(tokenizer), sequence)?;
        let fingerprint = fingerprint(&format!("documents {}", pieces.cut), sequence, &content);
        let samples = Kept::Pieces(pieces);
        return Ok(Dataset { samples, masking, sequence, documents: Some(documents), fingerprint });
    }
    Dataset::of_stream(stream, spec, masking, Some(header.documents), &content)
}

fn open_tokens(
    spec: &DatasetSpec,
    source: &Source,
    vocabulary: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Dataset> {
    let masking = masking(spec, vocabulary, false)?;
    let mut stream = Stream::new(vocabulary);
    let mut reading = String::new();
    for file in &source.files {
        let (integer, name) = token_type(file, vocabulary)?;
        let width = integer.width() as u64;
        if file.bytes == 0 {
            return Err(Error::Empty { path: file.path.clone() });
        }
        if file.bytes % width != 0 {
            let (path, bytes, width) = (file.path.clone(), file.bytes, integer.width());
            return Err(Error::BinSize { path, bytes, width, dtype: name });
        }
        stream.append(OpenFile::open(&file.path)?, integer, 0, file.bytes / width);
        reading.push_str(name);
    }
    let subject = Subject::Stream(&stream);
    let checked = check::check(source, &subject, &reading, vocabulary, &spec.cache, progress)?;
    Dataset::of_stream(stream, spec, masking, None, &checked.content)
}

fn open_rows(
    spec: &DatasetSpec,
    source: &Source,
    vocabulary: usize,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Dataset> {
    let sequence = spec.sequence;
    let mut rows = Rows::new(sequence, vocabulary);
    for file in &source.files {
        rows.append(&file.path)?;
    }
    let masking = if rows.labelled() { None } else { masking(spec, vocabulary, false)? };
    let subject = Subject::Rows { rows: &rows, sequence };
    let checked = check::check(source, &subject, "rows", vocabulary, &spec.cache, progress)?;
    let fingerprint = fingerprint("rows", sequence, &checked.content);
    Ok(Dataset { samples: Kept::Rows(rows), masking, sequence, documents: None, fingerprint })
}

/// How the dataset's tokens are masked, if they are.
fn masking(spec: &DatasetSpec, vocabulary: usize, is_text: bool) -> Result<Option<Masking>> {
    spec.masked.map(|seed| Masking::new(&spec.tokenizer, vocabulary, seed, is_text)).transpose()
}

/// The type of a `.bin` file's tokens: what the JSON file beside it says, or else what the model needs.
fn token_type(file: &SourceFile, vocabulary: usize) -> Result<(Integer, &'static str)> {
    /// `NAME.bin.json`; whoever writes one may put more in it.
    #[derive(serde::Deserialize)]
    struct Sidecar {
        dtype: String,
    }
    let mut path = file.path.clone().into_os_string();
    path.push(".json");
    let path = PathBuf::from(path);
    let content = match std::fs::read(&path) {
        Ok(content) => content,
        Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {
            let narrow = vocabulary <= 1 << 16;
            return Ok(if narrow { (Integer::U16, "u16") } else { (Integer::U32, "u32") });
        }
        Err(cause) => return Err(Error::io("read", &path, cause)),
    };
    let sidecar: Sidecar = serde_json::from_slice(&content)
        .map_err(|error| Error::Sidecar { path: path.clone(), message: error.to_string() })?;
    match sidecar.dtype.as_str() {
        "u16" | "uint16" => Ok((Integer::U16, "u16")),
        "u32" | "uint32" => Ok((Integer::U32, "u32")),
        other => {
            Err(Error::Sidecar { path, message: format!("its dtype is {other:?}, not \"u16\" or \"u32\"") })
        }
    }
}

fn fingerprint(cut: &str, sequence: usize, content: &str) -> String {
    blake3::hash(format!("{cut} {sequence} {content}").as_bytes()).to_hex().to_string()
}
