//! Images and their classes: from `.safetensors` files, `images` of [count, channels, rows, columns] and `labels` of
//! [count]; or from folders of pictures. A sample is normalised and, while training, shifted and mirrored by chance; by
//! which is a function of (seed, epoch, sample), so that a resumed run and every cut of the batch see the same.

use crate::IGNORED;
use crate::error::{Error, Result};
use crate::files::{Integer, OpenFile};
use crate::order::mix;
use crate::pictures::Pictures;
use crate::tensors;
use safetensors::Dtype;
use std::path::{Path, PathBuf};

/// What a dataset of images is opened with.
#[derive(Clone, Debug)]
pub struct ImageSpec {
    /// The file or folder.
    pub source: PathBuf,
    /// Channels, rows and columns of an image.
    pub shape: [usize; 3],
    /// The model's classes: every label must be below.
    pub classes: usize,
    /// The folder that notes on checked files are kept in; it is made if it is not there.
    pub cache: PathBuf,
    /// What is taken from each channel, and what it is divided by then.
    pub mean: Vec<f32>,
    pub deviation: Vec<f32>,
    /// How training varies images; of held-out ones the middle is shown.
    pub variation: Option<Variation>,
    /// The classes' names, where a folder of pictures must share them with another.
    pub class_names: Option<Vec<String>>,
}

/// How images are varied from epoch to epoch.
#[derive(Clone, Copy, Debug)]
pub struct Variation {
    pub seed: u64,
    /// Every second image is mirrored, left to right.
    pub flip: bool,
    /// Images are shifted by up to so many pixels each way; what comes in is black. A picture that is not square is
    /// shown from any place along its longer side.
    pub crop_padding: usize,
}

/// Where in an image the part of it stands that a sample shows; partly outside where the image is shifted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Window {
    top: isize,
    left: isize,
    mirrored: bool,
}

/// How a pixel is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Pixel {
    /// 0 to 255, which stand for 0 to 1.
    U8,
    F32,
}

impl Pixel {
    fn bytes(self) -> usize {
        match self {
            Pixel::U8 => 1,
            Pixel::F32 => 4,
        }
    }
}

/// One file's images.
#[derive(Debug)]
struct ImageFile {
    file: OpenFile,
    pixel: Pixel,
    /// Where images and labels begin.
    images: u64,
    labels: u64,
    label: Integer,
    /// The number of its first image among all files'.
    first: u64,
}

/// Where images are.
#[derive(Debug)]
enum Place {
    Tensors(Vec<ImageFile>),
    Pictures(Pictures),
}

/// The images of one or more files, in order.
#[derive(Debug)]
pub(crate) struct Images {
    place: Place,
    pub count: u64,
    shape: [usize; 3],
    classes: usize,
    mean: Vec<f32>,
    deviation: Vec<f32>,
    variation: Option<Variation>,
}

impl Images {
    fn new(spec: &ImageSpec, place: Place) -> Self {
        assert!(spec.mean.len() == spec.shape[0] && spec.deviation.len() == spec.shape[0]);
        let (mean, deviation) = (spec.mean.clone(), spec.deviation.clone());
        let (shape, classes, variation) = (spec.shape, spec.classes, spec.variation);
        let count = match &place {
            Place::Tensors(_) => 0,
            Place::Pictures(pictures) => pictures.count(),
        };
        Self { place, count, shape, classes, mean, deviation, variation }
    }

    /// For the images of files that are to be appended.
    pub fn of_tensors(spec: &ImageSpec) -> Self {
        Images::new(spec, Place::Tensors(Vec::new()))
    }

    pub fn of_pictures(spec: &ImageSpec, pictures: Pictures) -> Self {
        Images::new(spec, Place::Pictures(pictures))
    }

    /// Where they are pictures in folders.
    pub fn pictures(&self) -> Option<&Pictures> {
        match &self.place {
            Place::Tensors(_) => None,
            Place::Pictures(pictures) => Some(pictures),
        }
    }

    /// Numbers of one image.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Appends the images of the file at `path`.
    pub fn append(&mut self, path: &Path) -> Result<()> {
        let file = OpenFile::open(path)?;
        let (metadata, start) = tensors::read_header(&file)?;
        let find = |tensor: &'static str| {
            let missing = || Error::NoTensor { path: path.into(), tensor, has: metadata.offset_keys() };
            metadata.info(tensor).ok_or_else(missing)
        };
        let (images, labels) = (find("images")?, find("labels")?);
        let pixel = match images.dtype {
            Dtype::U8 => Pixel::U8,
            Dtype::F32 => Pixel::F32,
            other => return Err(Error::NotPixels { path: path.into(), found: other.to_string() }),
        };
        let count = images.shape.first().copied().unwrap_or_default();
        if images.shape.get(1..) != Some(&self.shape[..]) {
            let (found, expected) = (images.shape.clone(), self.shape);
            return Err(Error::ImageShape { path: path.into(), found, expected });
        }
        if labels.shape != [count] {
            let found = labels.shape.clone();
            return Err(Error::LabelShape { path: path.into(), found, images: count });
        }
        let label = tensors::integer(labels.dtype).ok_or_else(|| Error::NotIntegers {
            path: path.into(),
            tensor: "labels",
            found: labels.dtype.to_string(),
        })?;
        if count == 0 {
            return Err(Error::Empty { path: path.into() });
        }
        let at = |(from, _): (usize, usize)| start + from as u64;
        let (images, labels) = (at(images.data_offsets), at(labels.data_offsets));
        let Place::Tensors(files) = &mut self.place else { panic!("tensors are not appended to pictures") };
        files.push(ImageFile { file, pixel, images, labels, label, first: self.count });
        self.count += count as u64;
        Ok(())
    }

    /// The pixels of image `index` as they are stored, each between 0 and 1 where they are bytes, and its label.
    pub fn read_stored(&self, index: u64, pixels: &mut [f32]) -> Result<i32> {
        assert!(index < self.count, "an image beyond the last");
        let files = match &self.place {
            Place::Tensors(files) => files,
            Place::Pictures(_) => panic!("pictures are not stored as they are read"),
        };
        let file = &files[files.partition_point(|file| file.first <= index) - 1];
        let row = index - file.first;
        let (image_bytes, label_bytes) = (self.elements() * file.pixel.bytes(), file.label.width());
        let mut bytes = vec![0; image_bytes];
        file.file.read_at(&mut bytes, file.images + row * image_bytes as u64)?;
        match file.pixel {
            Pixel::U8 => {
                for (pixel, byte) in pixels.iter_mut().zip(&bytes) {
                    *pixel = f32::from(*byte) / 255.0;
                }
            }
            Pixel::F32 => {
                for (pixel, bytes) in pixels.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *pixel = f32::from_le_bytes(*bytes);
                }
            }
        }
        if pixels.iter().any(|pixel| !pixel.is_finite()) {
            return Err(Error::NotFinite { path: file.file.path.clone(), image: row });
        }
        let mut label = vec![0; label_bytes];
        file.file.read_at(&mut label, file.labels + row * label_bytes as u64)?;
        let mut labels = Vec::new();
        file.label.decode(&label, &mut labels);
        let label = labels[0];
        let inside = usize::try_from(label).is_ok_and(|label| label < self.classes);
        if !inside && label != i64::from(IGNORED) {
            let (path, classes) = (file.file.path.clone(), self.classes);
            return Err(Error::NoClass { path, image: row, label, classes });
        }
        Ok(label as i32)
    }

    /// Reads image `index` as `epoch` has it, and its label.
    pub fn read(&self, epoch: u64, index: u64, out: &mut [f32], label: &mut [i32]) -> Result<()> {
        assert_eq!((out.len(), label.len()), (self.elements(), 1));
        let [_, rows, columns] = self.shape;
        match &self.place {
            Place::Tensors(_) => {
                label[0] = self.read_stored(index, out)?;
                let window = self.window(epoch, index, (rows, columns));
                if window != (Window { top: 0, left: 0, mirrored: false }) {
                    let stored = out.to_vec();
                    let pixel = |channel, row, column| stored[(channel * rows + row) * columns + column];
                    window.show(self.shape, (rows, columns), pixel, out);
                }
            }
            Place::Pictures(pictures) => {
                let picture = pictures.read(index)?;
                label[0] = pictures.label(index);
                let whole = (picture.rows, picture.columns);
                let pixel = |channel, row, column| {
                    f32::from(picture.pixels[3 * (row * picture.columns + column) + channel]) / 255.0
                };
                self.window(epoch, index, whole).show(self.shape, whole, pixel, out);
            }
        }
        let scales = self.mean.iter().zip(&self.deviation);
        for (channel, (mean, deviation)) in out.chunks_exact_mut(rows * columns).zip(scales) {
            channel.iter_mut().for_each(|pixel| *pixel = (*pixel - mean) / deviation);
        }
        Ok(())
    }

    /// What a sample shows of an image of `whole` rows and columns.
    fn window(&self, epoch: u64, sample: u64, whole: (usize, usize)) -> Window {
        let shown = (self.shape[1], self.shape[2]);
        match self.variation {
            Some(variation) => variation.window(epoch, sample, whole, shown),
            None => {
                let middle = |whole: usize, shown: usize| (whole - shown) as isize / 2;
                Window { top: middle(whole.0, shown.0), left: middle(whole.1, shown.1), mirrored: false }
            }
        }
    }
}

impl Variation {
    /// The part of `shown` rows and columns that is seen of an image of `whole`.
    fn window(&self, epoch: u64, sample: u64, whole: (usize, usize), shown: (usize, usize)) -> Window {
        let key = mix(mix(mix(self.seed).wrapping_add(epoch)).wrapping_add(sample));
        let draw = |salt: u64, below: usize| (mix(key.wrapping_add(salt)) % below as u64) as usize;
        let padding = self.crop_padding;
        let place = |salt: u64, whole: usize, shown: usize| {
            draw(salt, whole + 2 * padding - shown + 1) as isize - padding as isize
        };
        Window {
            top: place(0, whole.0, shown.0),
            left: place(1, whole.1, shown.1),
            mirrored: self.flip && draw(2, 2) == 1,
        }
    }
}

impl Window {
    /// Fills `out`, channel by channel, from an image of `whole` rows and columns whose black is 0.
    fn show(
        &self,
        [_, rows, columns]: [usize; 3],
        whole: (usize, usize),
        pixel: impl Fn(usize, usize, usize) -> f32,
        out: &mut [f32],
    ) {
        let inside = |place: usize, offset: isize, whole: usize| {
            place.checked_add_signed(offset).filter(|place| *place < whole)
        };
        for (place, shown) in out.iter_mut().enumerate() {
            let (channel, row, column) = (place / (rows * columns), place / columns % rows, place % columns);
            let column = if self.mirrored { columns - 1 - column } else { column };
            let from = inside(row, self.top, whole.0).zip(inside(column, self.left, whole.1));
            *shown = from.map_or(0.0, |(row, column)| pixel(channel, row, column));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_mirrored_and_shifted_by_seed_epoch_and_sample() {
        let image: Vec<f32> = (1..=16).map(|pixel| pixel as f32).collect();
        let varied = |variation: Variation, epoch: u64, sample: u64| {
            let mut pixels = image.clone();
            let window = variation.window(epoch, sample, (4, 4), (4, 4));
            window.show([1, 4, 4], (4, 4), |_, row, column| image[4 * row + column], &mut pixels);
            pixels
        };
        let flip = Variation { seed: 1, flip: true, crop_padding: 0 };
        let mirror: Vec<f32> = image.chunks(4).flat_map(|row| row.iter().rev().copied()).collect();
        let mirrored = (0..1000).filter(|sample| varied(flip, 0, *sample) == mirror).count();
        let kept = (0..1000).filter(|sample| varied(flip, 0, *sample) == image).count();
        assert_eq!(mirrored + kept, 1000);
        assert!((450..550).contains(&mirrored), "{mirrored}");

        let crop = Variation { seed: 1, flip: false, crop_padding: 1 };
        let mut seen: Vec<Vec<f32>> = (0..200).map(|sample| varied(crop, 3, sample)).collect();
        assert_eq!(seen, (0..200).map(|sample| varied(crop, 3, sample)).collect::<Vec<_>>());
        assert_ne!(seen, (0..200).map(|sample| varied(crop, 4, sample)).collect::<Vec<_>>());
        seen.sort_by(|a, b| a.partial_cmp(b).unwrap());
        seen.dedup();
        assert_eq!(seen.len(), 9, "three places each way");
        // Down and to the right, black comes in at the top and the left.
        let shifted = [0., 0., 0., 0., 0., 1., 2., 3., 0., 5., 6., 7., 0., 9., 10., 11.];
        assert!(seen.contains(&shifted.to_vec()) && seen.contains(&image));
    }

    #[test]
    fn a_longer_image_is_shown_from_any_place_along_it() {
        let variation = Variation { seed: 3, flip: false, crop_padding: 0 };
        let windows = (0..500).map(|sample| variation.window(0, sample, (4, 7), (4, 4)));
        let mut places: Vec<_> = windows.map(|window| (window.top, window.left)).collect();
        places.sort_unstable();
        places.dedup();
        assert_eq!(places, [(0, 0), (0, 1), (0, 2), (0, 3)]);
    }
}
