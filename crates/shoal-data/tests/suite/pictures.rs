//! Pictures in folders of classes: which sample they become, what a model sees of them, and what is refused.

use std::io::Cursor;

use image::{DynamicImage, GrayImage, ImageFormat, LumaA, Rgb, RgbImage, Rgba, RgbaImage};
use shoal_data::{Dataset, Error, ImageSpec, Inputs, Variation};

use crate::common::Folder;

const SIZE: usize = 4;

fn encoded(image: impl Into<DynamicImage>, format: ImageFormat) -> Vec<u8> {
    let mut bytes = Cursor::new(Vec::new());
    image.into().write_to(&mut bytes, format).unwrap();
    bytes.into_inner()
}

fn png(image: impl Into<DynamicImage>) -> Vec<u8> {
    encoded(image, ImageFormat::Png)
}

/// One colour.
fn plain(colour: [u8; 3]) -> RgbImage {
    RgbImage::from_pixel(SIZE as u32, SIZE as u32, Rgb(colour))
}

/// Colours that change slowly, as a photograph's: JPEG keeps them nearly.
fn slope(width: u32, height: u32) -> RgbImage {
    RgbImage::from_fn(width, height, |x, y| Rgb([(x * 255 / width) as u8, (y * 255 / height) as u8, 128]))
}

fn spec(folder: &Folder, name: &str, classes: usize) -> ImageSpec {
    ImageSpec {
        source: folder.join(name),
        shape: [3, SIZE, SIZE],
        classes,
        cache: folder.cache(),
        mean: vec![0.0; 3],
        deviation: vec![1.0 / 255.0; 3],
        variation: None,
        class_names: None,
    }
}

fn open(spec: &ImageSpec) -> Result<Dataset, Error> {
    Dataset::open_images(spec, &mut |done, total| assert!(done <= total))
}

/// Red, green and blue of a sample, rounded to what was stored, and its label.
fn read(dataset: &Dataset, epoch: u64, index: u64) -> ([Vec<i32>; 3], i32) {
    let (mut pixels, mut label) = (vec![7.0; 3 * SIZE * SIZE], [7]);
    dataset.read(epoch, index, Inputs::Images(&mut pixels), &mut label).unwrap();
    let channel = |number: usize| {
        let of = &pixels[number * SIZE * SIZE..(number + 1) * SIZE * SIZE];
        of.iter().map(|pixel| pixel.round() as i32).collect()
    };
    ([channel(0), channel(1), channel(2)], label[0])
}

fn refused(spec: &ImageSpec, parts: &[&str], hint: &str) {
    let error = open(spec).map(|dataset| dataset.len()).expect_err("it opens");
    let (text, hinted) = (error.to_string(), error.hint().unwrap_or_default());
    assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    assert!(!hinted.is_empty() && hinted.contains(hint), "{hinted}, for {text}");
}

#[test]
fn folders_are_classes_in_the_order_of_their_names_and_all_kinds_of_pictures_are_rgb() {
    let folder = Folder::new();
    folder.write("data/gull/2.png", png(plain([10, 20, 30])));
    folder.write("data/gull/1.PNG", png(GrayImage::from_pixel(4, 4, image::Luma([99]))));
    folder.write("data/gull/notes.txt", "seen at the jetty");
    folder.write("data/.hidden/1.png", "no picture");
    folder.write("data/README.md", "gulls and crabs");
    folder.write("data/crab/deep/er/a.png", png(RgbaImage::from_pixel(4, 4, Rgba([1, 2, 3, 0]))));
    folder.write("data/crab/b.jpeg", png(plain([40, 50, 60])));
    let wide = image::ImageBuffer::from_pixel(4, 4, LumaA([0x1234u16, 0xffff]));
    folder.write("data/crab/c.png", png(wide));
    let dataset = open(&spec(&folder, "data", 2)).unwrap();
    assert_eq!(dataset.class_names().unwrap(), ["crab", "gull"]);
    assert_eq!(dataset.len(), 5);
    let colours: Vec<([i32; 3], i32)> = (0..5)
        .map(|index| {
            let (channels, label) = read(&dataset, 0, index);
            assert!(channels.iter().all(|channel| channel.iter().all(|pixel| *pixel == channel[0])));
            (channels.map(|channel| channel[0]), label)
        })
        .collect();
    let expected =
        [([40, 50, 60], 0), ([18, 18, 18], 0), ([1, 2, 3], 0), ([99, 99, 99], 1), ([10, 20, 30], 1)];
    assert_eq!(colours, expected);
    let again = open(&spec(&folder, "data", 2)).unwrap();
    assert_eq!(again.fingerprint(), dataset.fingerprint());
    folder.write("data/gull/2.png", png(plain([10, 20, 31])));
    assert_ne!(open(&spec(&folder, "data", 2)).unwrap().fingerprint(), dataset.fingerprint());
}

/// Pillow 13 gives these numbers for the same picture, made and scaled by
/// `Image.resize((6, 4), Image.BILINEAR)` and cut in the middle.
#[test]
fn a_larger_picture_is_scaled_by_its_shorter_side_and_its_middle_is_shown() {
    let folder = Folder::new();
    folder.write("data/only/a.png", png(slope(15, 10)));
    let dataset = open(&spec(&folder, "data", 1)).unwrap();
    let ([red, green, blue], _) = read(&dataset, 0, 0);
    assert_eq!(red[..4], [55, 98, 140, 183]);
    assert_eq!([green[0], green[4], green[8], green[12]], [25, 82, 147, 204]);
    assert!(blue.iter().all(|pixel| *pixel == 128));
    // A smaller one is scaled up.
    folder.write("small/only/a.png", png(RgbImage::from_pixel(1, 2, Rgb([5, 6, 7]))));
    let small = open(&spec(&folder, "small", 1)).unwrap();
    assert!(read(&small, 0, 0).0[2].iter().all(|pixel| *pixel == 7));
}

#[test]
fn training_shows_every_part_of_a_picture_by_seed_epoch_and_sample() {
    let folder = Folder::new();
    folder.write("data/only/a.png", png(slope(8, 4)));
    let variation = Some(Variation { seed: 1, flip: true, crop_padding: 0 });
    let varied = open(&ImageSpec { variation, ..spec(&folder, "data", 1) }).unwrap();
    let again = open(&ImageSpec { variation, ..spec(&folder, "data", 1) }).unwrap();
    let mut rows: Vec<Vec<i32>> = Vec::new();
    for epoch in 0..200 {
        assert_eq!(read(&varied, epoch, 0), read(&again, epoch, 0));
        let mut row = read(&varied, epoch, 0).0[0][..4].to_vec();
        row.sort_unstable();
        rows.push(row);
    }
    rows.sort();
    rows.dedup();
    assert_eq!(rows.len(), 5, "places along the longer side: {rows:?}");
}

#[test]
fn many_samples_are_read_on_several_threads_as_one_by_one() {
    let folder = Folder::new();
    for index in 0..9u8 {
        folder.write(&format!("data/{}/{index}.png", index % 3), png(plain([index, 2 * index, 3 * index])));
    }
    let dataset = open(&spec(&folder, "data", 3)).unwrap();
    let places: Vec<(u64, u64)> = (0..9).rev().map(|index| (0, index)).collect();
    let (mut pixels, mut labels) = (vec![0.0; 9 * 3 * SIZE * SIZE], vec![0; 9]);
    dataset.read_all(&places, Inputs::Images(&mut pixels), &mut labels).unwrap();
    for ((_, index), (pixels, label)) in places.iter().zip(pixels.chunks(3 * SIZE * SIZE).zip(&labels)) {
        let (mut alone, mut own) = (vec![0.0; 3 * SIZE * SIZE], [0]);
        dataset.read(0, *index, Inputs::Images(&mut alone), &mut own).unwrap();
        assert_eq!((pixels, *label), (&alone[..], own[0]));
    }
}

#[test]
fn a_jpeg_is_read_and_one_that_was_cut_off_is_not() {
    let folder = Folder::new();
    let whole = encoded(slope(64, 64), ImageFormat::Jpeg);
    folder.write("data/only/a.jpg", &whole);
    let ([red, ..], _) = read(&open(&spec(&folder, "data", 1)).unwrap(), 0, 0);
    assert!((red[0] - 35).abs() < 4 && (red[3] - 215).abs() < 4, "{red:?}");
    for (index, length) in [0, 1, 3, 10, 100, whole.len() / 2, whole.len() - 2].into_iter().enumerate() {
        let name = format!("cut {index}");
        folder.write(&format!("{name}/only/a.jpg"), &whole[..length]);
        refused(&spec(&folder, &name, 1), &["a.jpg"], "");
    }
    let whole = png(slope(64, 64));
    for (index, length) in [9, 100, whole.len() / 2, whole.len() - 13].into_iter().enumerate() {
        let name = format!("cut png {index}");
        folder.write(&format!("{name}/only/a.png"), &whole[..length]);
        refused(&spec(&folder, &name, 1), &["a.png"], "");
    }
}

#[test]
fn what_is_no_folder_of_classes_is_refused_by_name() {
    let folder = Folder::new();
    let picture = png(plain([1, 2, 3]));
    folder.write("flat/a.png", &picture);
    refused(&spec(&folder, "flat", 1), &["flat/a.png", "no class"], "folders, one a class");
    folder.write("partly/gull/a.png", &picture);
    folder.write("partly/b.png", &picture);
    refused(&spec(&folder, "partly", 1), &["partly/b.png"], "folders");
    folder.write("empty/gull/a.png", &picture);
    std::fs::create_dir(folder.join("empty/crab")).unwrap();
    refused(&spec(&folder, "empty", 2), &["empty/crab", "no picture"], "");
    folder.write("count/gull/a.png", &picture);
    refused(&spec(&folder, "count", 1000), &["count", "1 classes", "1000"], "model.classes = 1");
    folder.write("gif/gull/a.png", &picture);
    folder.write("gif/gull/b.gif", "GIF89a");
    refused(&spec(&folder, "gif", 1), &["b.gif"], "convert");
    folder.write("other/gull/b.jpg", "GIF89a and so on");
    refused(&spec(&folder, "other", 1), &["b.jpg", "Gif"], "convert");
    folder.write("text/gull/b.jpg", "not a picture at all");
    refused(&spec(&folder, "text", 1), &["b.jpg", "no known kind"], "convert");
    folder.write("thin/gull/b.png", png(RgbImage::new(400, 4)));
    refused(&spec(&folder, "thin", 1), &["b.png", "400 x 4"], "shape");
    folder.write("mixed/gull/b.png", &picture);
    folder.write("mixed/gull/c.safetensors", "");
    refused(&spec(&folder, "mixed", 1), &["mixed", "c.safetensors"], "one kind");
    folder.write("good/gull/b.png", &picture);
    let grey =
        ImageSpec { shape: [1, 4, 4], mean: vec![0.0], deviation: vec![1.0], ..spec(&folder, "good", 1) };
    refused(&grey, &["good", "[1, 4, 4]"], "RGB");
    let known = Some(vec!["crab".to_owned()]);
    refused(
        &ImageSpec { class_names: known, ..spec(&folder, "good", 1) },
        &["good/gull", "crab"],
        "held-out",
    );
    std::fs::remove_file(folder.join("good/gull/b.png")).unwrap();
    refused(&spec(&folder, "good", 1), &["good"], "");
}

/// Numbers a held-out folder's classes as training's folder does, though it has fewer.
#[test]
fn a_held_out_folder_shares_the_numbers_of_classes() {
    let folder = Folder::new();
    folder.write("held-out/gull/a.png", png(plain([1, 2, 3])));
    let names = Some(["crab", "eel", "gull"].map(String::from).to_vec());
    let dataset = open(&ImageSpec { class_names: names, ..spec(&folder, "held-out", 3) }).unwrap();
    assert_eq!(read(&dataset, 0, 0).1, 2);
}

/// Bytes changed at random: refused or read, never a panic.
#[test]
fn damaged_pictures_do_no_harm() {
    let folder = Folder::new();
    let pictures = [encoded(slope(40, 30), ImageFormat::Jpeg), png(slope(40, 30))];
    for round in 0..300u64 {
        let mut bytes = pictures[round as usize % 2].clone();
        let mut state = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        for _ in 0..=round % 7 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let place = (state >> 33) as usize % bytes.len();
            bytes[place] = (state >> 24) as u8;
        }
        folder.write("data/only/a.png", bytes);
        match open(&spec(&folder, "data", 1)) {
            Ok(dataset) => assert_eq!(read(&dataset, 0, 0).1, 0),
            Err(error) => assert!(error.to_string().contains("a.png") && error.hint().is_some(), "{error}"),
        }
    }
}
